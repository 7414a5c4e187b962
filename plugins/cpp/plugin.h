// A TensorRT plugin (IPluginV3) of one of dspark's operators, and its creator: the C++ twin of plugins/registry.py.
//
// Knows TensorRT's interfaces. Does not know shapes, dtypes and attributes (contract.h) nor kernels (kernels.h).
#pragma once

#include <NvInfer.h>

#include <string>
#include <vector>

#include "contract.h"
#include "launches.h"

namespace dspark {

// Writes an error to TensorRT's log where it has given us one, else to stderr.
void report(const std::string& text);
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
public:
    Plugin(const Operator& op, const Attributes& attributes);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    const char* getPluginName() const noexcept override { return op_.name; }
    const char* getPluginVersion() const noexcept override { return VERSION; }
    const char* getPluginNamespace() const noexcept override { return NAMESPACE; }

    int32_t getNbOutputs() const noexcept override { return 1; }
    int32_t getAliasedInput(int32_t) noexcept override { return op_.aliased_input; }
    int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t, const nvinfer1::DataType* inputs, int32_t) const noexcept override;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t count, const nvinfer1::DimsExprs*, int32_t,
                            nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder&) noexcept override;
    bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t, int32_t) noexcept override;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, const nvinfer1::DynamicPluginTensorDesc*,
                            int32_t) noexcept override;
    size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, const nvinfer1::DynamicPluginTensorDesc*,
                            int32_t) const noexcept override;

    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t count, const nvinfer1::PluginTensorDesc*,
                          int32_t) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc*, const nvinfer1::PluginTensorDesc*, const void* const* inputs, void* const* outputs,
                    void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

private:
    launches::AttentionShape attention_shape(nvinfer1::DataType type, const Sizes& sizes) const;

    const Operator& op_;
    const Attributes attributes_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
    // What onShapeChange has chosen; that of the operator is used.
    launches::WriteShape write_{};
    launches::AttentionShape attention_{};
    launches::AttentionPlan plan_{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit Creator(const Operator& op);

    nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* given, nvinfer1::TensorRTPhase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
    const char* getPluginName() const noexcept override { return op_.name; }
    const char* getPluginVersion() const noexcept override { return VERSION; }
    const char* getPluginNamespace() const noexcept override { return NAMESPACE; }

private:
    const Operator& op_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace dspark
