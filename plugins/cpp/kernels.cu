// Every kernel of plugins/*.cuh, compiled by nvcc and launched with the CUDA runtime.
//
// Knows which template serves a shape, and the order of arguments as plugins/kernels.py has it; not TensorRT.
#include "kernels.h"

#include "block_attention.cuh"
#include "ring_write.cuh"

namespace dspark {
namespace launches {
namespace {

struct Kernels {
    const void* attend = nullptr;
    const void* merge = nullptr;
};

template <typename Element, int HEAD_DIM>
Kernels of_rows(int rows) {
    Kernels kernels;
    kernels.merge = reinterpret_cast<const void*>(&merge_splits<Element, HEAD_DIM>);
    if (rows == 16) kernels.attend = reinterpret_cast<const void*>(&block_attention<Element, HEAD_DIM, 16>);
    if (rows == 32) kernels.attend = reinterpret_cast<const void*>(&block_attention<Element, HEAD_DIM, 32>);
    if constexpr (HEAD_DIM <= 128) {
        if (rows == 48) kernels.attend = reinterpret_cast<const void*>(&block_attention<Element, HEAD_DIM, 48>);
        if (rows == 64) kernels.attend = reinterpret_cast<const void*>(&block_attention<Element, HEAD_DIM, 64>);
    }
    return kernels;
}

template <typename Element>
Kernels of_head_dim(int head_dim, int rows) {
    switch (head_dim) {
        case 64: return of_rows<Element, 64>(rows);
        case 80: return of_rows<Element, 80>(rows);
        case 96: return of_rows<Element, 96>(rows);
        case 128: return of_rows<Element, 128>(rows);
        case 256: return of_rows<Element, 256>(rows);
        default: return {};
    }
}

Kernels of_shape(const AttentionShape& shape, const AttentionPlan& plan) {
    switch (shape.dtype) {
        case Dtype::FLOAT32: return of_head_dim<float>(shape.head_dim, plan.tile_rows);
        case Dtype::FLOAT16: return of_head_dim<float16>(shape.head_dim, plan.tile_rows);
        default: return of_head_dim<bfloat16>(shape.head_dim, plan.tile_rows);
    }
}

int launch(const void* kernel, Grid grid, size_t shared_bytes, void** arguments, cudaStream_t stream) {
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
    return cudaLaunchKernel(kernel, blocks, dim3(BLOCK_THREADS), arguments, shared_bytes, stream);
}

static_assert(BLOCK_THREADS == THREADS && WARP_THREADS == WARP && ROWS_STEP == ROW_STEP && ACCESS_BYTES == VECTOR_BYTES,
              "launches.h and the kernels agree");

}  // namespace

int count_multiprocessors(int* count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

int prepare_attention(const AttentionShape& shape, const AttentionPlan& plan) {
    const void* kernel = of_shape(shape, plan).attend;
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared_bytes));
}

int launch_write(const WriteShape& shape, void* updated, const void* rows, const void* start, cudaStream_t stream) {
    int heads = shape.heads, capacity = shape.capacity, count = shape.rows, vectors = shape.vectors();
    void* arguments[] = {&updated, &rows, &start, &heads, &capacity, &count, &vectors};
    return launch(reinterpret_cast<const void*>(&ring_write), shape.grid(), 0, arguments, stream);
}

int launch_attention(const AttentionShape& shape, const AttentionPlan& plan, float scale, AttentionPointers p, cudaStream_t stream) {
    const Kernels kernels = of_shape(shape, plan);
    int kv_heads = shape.kv_heads, query_rows = plan.query_rows, block = shape.block, capacity = shape.capacity, splits = plan.splits;
    long long window = shape.window;
    float log2_scale = static_cast<float>(static_cast<double>(scale) * 1.4426950408889634);  // weights are powers of two
    void* attend[] = {&p.query,    &p.ring_key,  &p.ring_value, &p.block_key, &p.block_value, &p.total, &p.first,   &p.attended,
                      &p.workspace, &kv_heads,   &query_rows,   &block,       &capacity,      &splits,  &window,    &log2_scale};
    const int error = launch(kernels.attend, plan.attend, plan.shared_bytes, attend, stream);
    if (error != cudaSuccess || splits == 1) return error;
    int request_rows = shape.heads * block, all_rows = shape.batch * request_rows;
    void* merge[] = {&p.workspace, &p.total, &p.first, &p.attended, &all_rows, &request_rows, &block, &capacity, &splits, &window};
    return launch(kernels.merge, plan.merge, 0, merge, stream);
}

}  // namespace launches
}  // namespace dspark
