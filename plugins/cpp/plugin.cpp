// See plugin.h. Callbacks return 0, or -1 after reporting why not.
#include "plugin.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "kernels.h"

namespace dspark {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

int32_t refused(const std::string& fault) {
    if (fault.empty()) return 0;
    report(fault);
    return -1;
}

int32_t checked(const Operator& op, int error) {
    return error == 0 ? 0 : refused(std::string(op.name) + ": CUDA error " + std::to_string(error));
}

std::vector<int64_t> shape_of(const nvinfer1::Dims& dims) { return {dims.d, dims.d + dims.nbDims}; }

Shapes largest_shapes(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count) {
    Shapes shapes;
    for (int32_t i = 0; i < count; ++i) shapes.push_back(shape_of(inputs[i].max));
    return shapes;
}

bool is_float(DataType type) { return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16; }

launches::Dtype dtype_of(DataType type) {
    return type == DataType::kFLOAT ? launches::Dtype::FLOAT32 : type == DataType::kHALF ? launches::Dtype::FLOAT16 : launches::Dtype::BFLOAT16;
}

int size_of(const Sizes& sizes, char letter) { return static_cast<int>(sizes.at(letter)); }

PluginFieldType type_of(const Field& field) { return field.real != nullptr ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT64; }

// Sets an attribute from a field of its kind, of either width; false where it is of another kind.
bool read(const nvinfer1::PluginField& given, const Field& field, Attributes& attributes) {
    if (field.real != nullptr) {
        if (given.type == PluginFieldType::kFLOAT32) attributes.*field.real = *static_cast<const float*>(given.data);
        if (given.type == PluginFieldType::kFLOAT64) attributes.*field.real = static_cast<float>(*static_cast<const double*>(given.data));
        return given.type == PluginFieldType::kFLOAT32 || given.type == PluginFieldType::kFLOAT64;
    }
    if (given.type == PluginFieldType::kINT64) attributes.*field.whole = *static_cast<const int64_t*>(given.data);
    if (given.type == PluginFieldType::kINT32) attributes.*field.whole = *static_cast<const int32_t*>(given.data);
    return given.type == PluginFieldType::kINT64 || given.type == PluginFieldType::kINT32;
}

}  // namespace

void report(const std::string& text) {
    nvinfer1::ILoggerFinder* const finder = logger_finder;
    nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
    } else {
        std::fprintf(stderr, "%s\n", text.c_str());
    }
}

void set_logger_finder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

Plugin::Plugin(const Operator& op, const Attributes& attributes) : op_(op), attributes_(attributes) {
    for (const Field& field : op_.fields) {
        const void* const value = field.real != nullptr ? static_cast<const void*>(&(attributes_.*field.real)) : &(attributes_.*field.whole);
        fields_.emplace_back(field.name, value, type_of(field), 1);
    }
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        default: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    }
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
    Plugin* const copy = new Plugin(op_, attributes_);
    copy->write_ = write_;
    copy->attention_ = attention_;
    copy->plan_ = plan_;
    return copy;
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t, const DataType* inputs, int32_t) const noexcept {
    outputs[0] = inputs[0];
    return 0;
}

int32_t Plugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t count, const nvinfer1::DimsExprs*, int32_t,
                                nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder&) noexcept {
    Shapes shapes;
    for (int32_t i = 0; i < count; ++i) {
        shapes.emplace_back();
        for (int32_t axis = 0; axis < inputs[i].nbDims; ++axis) {
            const auto* const size = inputs[i].d[axis];
            shapes.back().push_back(size->isConstant() ? static_cast<int64_t>(size->getConstantValue()) : UNKNOWN);
        }
    }
    Sizes sizes;
    std::string fault = find_sizes(op_, shapes, sizes);
    if (fault.empty()) fault = find_disagreement(op_, attributes_, sizes);
    if (!fault.empty()) return refused(fault);
    outputs[0].nbDims = static_cast<int32_t>(std::strlen(op_.output.letters));
    for (int32_t axis = 0; axis < outputs[0].nbDims; ++axis) {
        const auto [input, source] = source_of(op_, op_.output.letters[axis]);
        outputs[0].d[axis] = inputs[input].d[source];
    }
    return 0;
}

bool Plugin::supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t inputs,
                                       int32_t) noexcept {
    const nvinfer1::PluginTensorDesc& tensor = tensors[position].desc;
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
    if (position < inputs && op_.inputs[static_cast<size_t>(position)].is_int64) return tensor.type == DataType::kINT64;
    return is_float(tensor.type) && tensor.type == tensors[0].desc.type;
}

int32_t Plugin::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, const nvinfer1::DynamicPluginTensorDesc*,
                                int32_t) noexcept {
    Sizes sizes;
    return refused(find_sizes(op_, largest_shapes(inputs, count), sizes));
}

size_t Plugin::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t count, const nvinfer1::DynamicPluginTensorDesc*,
                                int32_t) const noexcept {
    Sizes sizes;
    if (&op_ == &RING_WRITE || refused(find_sizes(op_, largest_shapes(inputs, count), sizes)) != 0) return 0;
    return launches::largest_workspace(attention_shape(inputs[0].desc.type, sizes));
}

int32_t Plugin::onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t count, const nvinfer1::PluginTensorDesc*, int32_t) noexcept {
    Shapes shapes;
    for (int32_t i = 0; i < count; ++i) shapes.push_back(shape_of(inputs[i].dims));
    Sizes sizes;
    if (refused(find_sizes(op_, shapes, sizes)) != 0) return -1;
    if (!launches::has_kernels(size_of(sizes, 'D'))) {
        return refused("head dimension " + std::to_string(sizes['D']) + " has no kernels: expected one of 64, 80, 96, 128, 256");
    }
    if (&op_ == &RING_WRITE) {
        write_ = {dtype_of(inputs[0].type), size_of(sizes, 'B'), size_of(sizes, 'G'), size_of(sizes, 'R'), size_of(sizes, 'N'),
                  size_of(sizes, 'D')};
        return 0;
    }
    int multiprocessors = 0;
    if (checked(op_, launches::count_multiprocessors(&multiprocessors)) != 0) return -1;
    attention_ = attention_shape(inputs[0].type, sizes);
    plan_ = launches::AttentionPlan::of(attention_, std::min(multiprocessors, launches::MOST_MULTIPROCESSORS));
    return checked(op_, launches::prepare_attention(attention_, plan_));
}

int32_t Plugin::enqueue(const nvinfer1::PluginTensorDesc*, const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    if (&op_ == &RING_WRITE) return checked(op_, launches::launch_write(write_, outputs[0], inputs[1], inputs[2], stream));
    const launches::AttentionPointers pointers{inputs[0], inputs[1], inputs[2],  inputs[3], inputs[4],
                                               inputs[5], inputs[6], outputs[0], workspace};
    return checked(op_, launches::launch_attention(attention_, plan_, attributes_.scale, pointers, stream));
}

launches::AttentionShape Plugin::attention_shape(DataType type, const Sizes& sizes) const {
    return {dtype_of(type),
            size_of(sizes, 'B'),
            size_of(sizes, 'H'),
            size_of(sizes, 'G'),
            size_of(sizes, 'T'),
            size_of(sizes, 'R'),
            size_of(sizes, 'D'),
            static_cast<long long>(attributes_.window)};
}

Creator::Creator(const Operator& op) : op_(op) {
    for (const Field& field : op_.fields) fields_.emplace_back(field.name, nullptr, type_of(field), 0);
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

nvinfer1::IPluginV3* Creator::createPlugin(const char*, const nvinfer1::PluginFieldCollection* given, nvinfer1::TensorRTPhase) noexcept {
    Attributes attributes;
    std::vector<std::string> faults;
    for (const Field& field : op_.fields) {
        const std::string name = field.name, kind = field.real != nullptr ? "float" : "int";
        const nvinfer1::PluginField* found = nullptr;
        for (int32_t i = 0; i < given->nbFields; ++i) {
            if (name == given->fields[i].name) found = &given->fields[i];
        }
        if (found == nullptr || found->data == nullptr) {
            faults.push_back("attribute " + name + " is missing, expected " + kind);
        } else if (!read(*found, field, attributes)) {
            faults.push_back("attribute " + name + " is of field type " + std::to_string(static_cast<int>(found->type)) + ", expected " + kind);
        } else if (field.whole != nullptr && attributes.*field.whole < 1) {
            faults.push_back("attribute " + name + " is " + std::to_string(attributes.*field.whole) + ", expected at least 1");
        }
    }
    if (!faults.empty()) {
        report(op_.name + (": " + joined(faults, "; ")));
        return nullptr;
    }
    return new Plugin(op_, attributes);
}

}  // namespace dspark
