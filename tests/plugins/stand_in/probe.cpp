// Drives the plugins of plugins/cpp as TensorRT would, through their interfaces and getCreators, with kernels that only note what they
// were asked. C functions for tests/plugins/test_cpp.py; texts go to one log.
#include <sstream>

#include "kernels.h"
#include "plugin.h"

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace {

std::ostringstream notes;
std::string told;
int multiprocessors = 132, next_error = 0;

struct Log final : nvinfer1::ILogger {
    void log(Severity severity, const char* text) noexcept override {
        notes << (severity == Severity::kERROR ? "error " : "other ") << text << "\n";
    }
} logger;

struct Finder final : nvinfer1::ILoggerFinder {
    nvinfer1::ILogger* findLogger() override { return &logger; }
} finder;

struct Size final : nvinfer1::IDimensionExpr {
    int64_t value = 0;
    bool isConstant() const noexcept override { return value >= 0; }
    int64_t getConstantValue() const noexcept override { return value; }
};

nvinfer1::IPluginCreatorV3One* creator(int number) {
    int32_t count = 0;
    return static_cast<nvinfer1::IPluginCreatorV3One*>(getCreators(count)[number]);
}

const char* tell() {
    told = notes.str();
    notes.str("");
    return told.c_str();
}

dspark::launches::AttentionShape shape(const int64_t* sizes) {
    const auto at = [sizes](int i) { return static_cast<int>(sizes[i]); };
    return {static_cast<dspark::launches::Dtype>(at(0)), at(1), at(2), at(3), at(4), at(5), at(6), sizes[7]};
}

}  // namespace

namespace dspark {
namespace launches {

int count_multiprocessors(int* count) {
    *count = multiprocessors;
    return next_error;
}

int prepare_attention(const AttentionShape&, const AttentionPlan& plan) {
    notes << "prepare " << plan.shared_bytes << "\n";
    return next_error;
}

int launch_write(const WriteShape& s, void* updated, const void* rows, const void* start, cudaStream_t stream) {
    notes << "write " << static_cast<int>(s.dtype) << " " << s.batch << " " << s.heads << " " << s.capacity << " " << s.rows << " "
          << s.head_dim << " at " << updated << " " << rows << " " << start << " on " << stream << "\n";
    return next_error;
}

int launch_attention(const AttentionShape& s, const AttentionPlan& plan, float scale, AttentionPointers p, cudaStream_t stream) {
    notes << "attend " << static_cast<int>(s.dtype) << " " << s.batch << " " << s.heads << " " << s.kv_heads << " " << s.block << " "
          << s.capacity << " " << s.head_dim << " " << s.window << " scale " << scale << " splits " << plan.splits << " at " << p.query << " "
          << p.ring_key << " " << p.ring_value << " " << p.block_key << " " << p.block_value << " " << p.total << " " << p.first << " "
          << p.attended << " " << p.workspace << " on " << stream << "\n";
    return next_error;
}

}  // namespace launches
}  // namespace dspark

extern "C" {

// sizes: dtype, batch, heads, kv_heads, block, capacity, head_dim, window
void attention_plan(const int64_t* sizes, int count, int64_t* out) {
    const auto plan = dspark::launches::AttentionPlan::of(shape(sizes), count);
    const int64_t values[] = {plan.query_rows, plan.tile_rows,  plan.splits,     static_cast<int64_t>(plan.shared_bytes),
                              plan.attend.x,   plan.attend.y,   plan.attend.z,   plan.merge.x,
                              plan.merge.y,    plan.merge.z,    static_cast<int64_t>(dspark::launches::workspace_bytes(shape(sizes), count)),
                              static_cast<int64_t>(dspark::launches::largest_workspace(shape(sizes)))};
    for (size_t i = 0; i < sizeof values / sizeof *values; ++i) out[i] = values[i];
}

void write_plan(int dtype, int batch, int heads, int capacity, int rows, int head_dim, int64_t* out) {
    const dspark::launches::WriteShape made{static_cast<dspark::launches::Dtype>(dtype), batch, heads, capacity, rows, head_dim};
    out[0] = made.grid().x, out[1] = made.grid().y, out[2] = made.grid().z, out[3] = made.vectors();
}

void set_device(int count, int error) { multiprocessors = count, next_error = error; }

const char* describe() {
    int32_t count = 0;
    getCreators(count);
    for (int i = 0; i < count; ++i) {
        auto* const made = creator(i);
        notes << made->getPluginNamespace() << "::" << made->getPluginName() << " " << made->getPluginVersion();
        const auto* const fields = made->getFieldNames();
        for (int f = 0; f < fields->nbFields; ++f) notes << " " << fields->fields[f].name << "=" << static_cast<int>(fields->fields[f].type);
        notes << "\n";
        const auto& op = i == 0 ? dspark::RING_WRITE : dspark::BLOCK_ATTENTION;
        for (const auto& input : op.inputs) notes << input.name << " " << dspark::declared(input.letters) << " " << input.is_int64 << "\n";
        notes << op.output.name << " " << dspark::declared(op.output.letters) << " " << op.aliased_input << "\n";
    }
    return tell();
}

// Creates a plugin from named fields and plays its life: build with the largest shapes, serialise, create again, clone, run.
// dims: four sizes an input, -1 where an axis is absent; dynamic: whether the batch is unknown when the network is made.
const char* play(int number, int fields, const char* const* names, const int* types, const void* const* values, int type, const int64_t* dims,
                 bool dynamic) {
    setLoggerFinder(&finder);
    std::vector<nvinfer1::PluginField> given;
    for (int i = 0; i < fields; ++i) given.emplace_back(names[i], values[i], static_cast<nvinfer1::PluginFieldType>(types[i]), 1);
    const nvinfer1::PluginFieldCollection collection{fields, given.data()};
    auto* const plugin = creator(number)->createPlugin("node", &collection, nvinfer1::TensorRTPhase::kBUILD);
    if (plugin == nullptr) return tell();
    using Capability = nvinfer1::PluginCapabilityType;
    auto* const build = static_cast<nvinfer1::IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(Capability::kBUILD));
    const int32_t inputs = number == 0 ? 3 : 7;
    std::vector<nvinfer1::DynamicPluginTensorDesc> tensors(static_cast<size_t>(inputs) + 1);
    std::vector<Size> sizes(static_cast<size_t>(inputs) * 4);
    std::vector<nvinfer1::DimsExprs> shapes(static_cast<size_t>(inputs));
    std::vector<nvinfer1::PluginTensorDesc> exact;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const bool is_index = number == 0 ? i == 2 : i == 5 || i == 6;
        tensors[i].desc.type = is_index ? nvinfer1::DataType::kINT64 : static_cast<nvinfer1::DataType>(type);
        tensors[i].desc.format = nvinfer1::TensorFormat::kLINEAR;
        for (int axis = 0; i < shapes.size() && axis < 4 && dims[i * 4 + static_cast<size_t>(axis)] >= 0; ++axis) {
            const int64_t size = dims[i * 4 + static_cast<size_t>(axis)];
            sizes[i * 4 + static_cast<size_t>(axis)].value = dynamic && axis == 0 ? -1 : size;
            shapes[i].d[axis] = &sizes[i * 4 + static_cast<size_t>(axis)];
            tensors[i].max.d[axis] = tensors[i].desc.dims.d[axis] = size;
            shapes[i].nbDims = tensors[i].max.nbDims = tensors[i].desc.dims.nbDims = axis + 1;
        }
        exact.push_back(tensors[i].desc);
    }
    nvinfer1::IExprBuilder expressions;
    nvinfer1::DimsExprs output{};
    if (build->getOutputShapes(shapes.data(), inputs, nullptr, 0, &output, 1, expressions) != 0) return tell();
    notes << "output";  // which input's which axis each size is
    for (int axis = 0; axis < output.nbDims; ++axis) notes << " " << static_cast<const Size*>(output.d[axis]) - sizes.data();
    nvinfer1::DataType output_type{};
    build->getOutputDataTypes(&output_type, 1, &tensors[0].desc.type, inputs);
    notes << " type " << static_cast<int>(output_type) << " alias " << build->getAliasedInput(0) << " of " << build->getNbOutputs() << "\nformats";
    for (int32_t i = 0; i <= inputs; ++i) {
        auto& tensor = tensors[static_cast<size_t>(i)].desc;
        const nvinfer1::PluginTensorDesc right = tensor;
        notes << " " << build->supportsFormatCombination(i, tensors.data(), inputs, 1);
        tensor.format = nvinfer1::TensorFormat::kCHW2;
        notes << build->supportsFormatCombination(i, tensors.data(), inputs, 1);
        tensor = right;
        tensor.type = nvinfer1::DataType::kINT32;
        notes << build->supportsFormatCombination(i, tensors.data(), inputs, 1);
        tensor.type = right.type == nvinfer1::DataType::kHALF ? nvinfer1::DataType::kFLOAT : nvinfer1::DataType::kHALF;
        notes << build->supportsFormatCombination(i, tensors.data(), inputs, 1);
        tensor = right;
    }
    notes << "\n";
    if (build->configurePlugin(tensors.data(), inputs, nullptr, 1) != 0) return tell();
    notes << "workspace " << build->getWorkspaceSize(tensors.data(), inputs, nullptr, 1) << "\n";
    auto* const first = static_cast<nvinfer1::IPluginV3OneRuntime*>(plugin->getCapabilityInterface(Capability::kRUNTIME));
    auto* const loaded = creator(number)->createPlugin("node", first->getFieldsToSerialize(), nvinfer1::TensorRTPhase::kRUNTIME);
    delete plugin;  // what was made from it, or cloned, has attributes of its own
    auto* const held = static_cast<nvinfer1::IPluginV3OneRuntime*>(loaded->getCapabilityInterface(Capability::kRUNTIME))->attachToContext(nullptr);
    delete loaded;
    auto* const runtime = static_cast<nvinfer1::IPluginV3OneRuntime*>(held->getCapabilityInterface(Capability::kRUNTIME));
    if (runtime->onShapeChange(exact.data(), inputs, nullptr, 1) == 0) {
        const void* addresses[7];
        for (int i = 0; i < 7; ++i) addresses[i] = reinterpret_cast<const void*>(static_cast<uintptr_t>(0x100 * (i + 1)));
        void* const outputs[] = {reinterpret_cast<void*>(0xa00)};
        const int32_t status = runtime->enqueue(nullptr, nullptr, addresses, outputs, reinterpret_cast<void*>(0xb00), reinterpret_cast<cudaStream_t>(0xc00));
        notes << "enqueue " << status << "\n";
    }
    delete held;
    return tell();
}
}
