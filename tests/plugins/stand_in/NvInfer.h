// A stand-in for TensorRT's NvInfer.h, for a syntax check and a test of plugins/cpp where TensorRT is not installed. It is NOT TensorRT's:
// it declares only the names that plugins/cpp uses, with the signatures that TensorRT's public documentation gives (10.x and 11.x), and
// its classes have another layout. Nothing that is compiled against it works with TensorRT.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT8 = 2, kINT32 = 3, kBOOL = 4, kUINT8 = 5, kFP8 = 6, kBF16 = 7, kINT64 = 8 };
enum class TensorFormat : int32_t { kLINEAR = 0, kCHW2 = 1 };
enum class PluginFieldType : int32_t { kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR, kDIMS, kUNKNOWN, kBF16, kINT64 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

struct Dims {
    int32_t nbDims;
    int64_t d[8];
};

class IDimensionExpr {
public:
    virtual ~IDimensionExpr() = default;
    virtual bool isConstant() const noexcept = 0;
    virtual int64_t getConstantValue() const noexcept = 0;
};

struct DimsExprs {
    int32_t nbDims;
    const IDimensionExpr* d[8];
};

class IExprBuilder {};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min, max, opt;
};

struct PluginField {
    const AsciiChar* name;
    const void* data;
    PluginFieldType type;
    int32_t length;

    PluginField(const AsciiChar* name_ = nullptr, const void* data_ = nullptr, PluginFieldType type_ = PluginFieldType::kUNKNOWN,
                int32_t length_ = 0) noexcept
        : name(name_), data(data_), type(type_), length(length_) {}
};

struct PluginFieldCollection {
    int32_t nbFields{};
    const PluginField* fields{};
};

class IVersionedInterface {
public:
    virtual ~IVersionedInterface() noexcept = default;
};

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};
class IPluginResourceContext {};

class IPluginV3 : public IVersionedInterface {
public:
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    virtual const AsciiChar* getPluginName() const noexcept = 0;
    virtual const AsciiChar* getPluginVersion() const noexcept = 0;
    virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuildV2 : public IPluginCapability {
public:
    virtual int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t nbInputs, const DynamicPluginTensorDesc* out,
                                    int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, const DataType* inputTypes,
                                       int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(const DimsExprs* inputs, int32_t nbInputs, const DimsExprs* shapeInputs, int32_t nbShapeInputs,
                                    DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* inOut, int32_t nbInputs,
                                           int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*, int32_t) const noexcept {
        return 0;
    }
    virtual int32_t getAliasedInput(int32_t) noexcept { return -1; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    virtual int32_t onShapeChange(const PluginTensorDesc* in, int32_t nbInputs, const PluginTensorDesc* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(const PluginTensorDesc* inputDesc, const PluginTensorDesc* outputDesc, const void* const* inputs,
                            void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    virtual IPluginV3* createPlugin(const AsciiChar* name, const PluginFieldCollection* fc, TensorRTPhase phase) noexcept = 0;
    virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
    virtual const AsciiChar* getPluginName() const noexcept = 0;
    virtual const AsciiChar* getPluginVersion() const noexcept = 0;
    virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

class ILogger {
public:
    enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };
    virtual ~ILogger() = default;
    virtual void log(Severity severity, const AsciiChar* msg) noexcept = 0;
};

class ILoggerFinder {
public:
    virtual ~ILoggerFinder() = default;
    virtual ILogger* findLogger() = 0;
};

class IPluginRegistry {
public:
    virtual ~IPluginRegistry() = default;
    virtual bool registerCreator(IPluginCreatorInterface& creator, const AsciiChar* pluginNamespace) noexcept = 0;
};

}  // namespace nvinfer1

extern "C" nvinfer1::IPluginRegistry* getPluginRegistry() noexcept;
