// How the kernels are launched: grids, shared memory, scratch memory. The C++ twin of plugins/kernels.py and of the limit in
// plugins/launch.py; tests/plugins/test_cpp.py compares the two over a grid of shapes.
//
// Knows numbers only: no CUDA, no TensorRT, so that any compiler can test it. Letters as in plugins/kernels.py.
#pragma once

#include <algorithm>
#include <cstddef>

namespace dspark {
namespace launches {

enum class Dtype { FLOAT32, FLOAT16, BFLOAT16 };

// Work is divided for at most so many, since an engine's scratch memory is fixed where it is built.
constexpr int MOST_MULTIPROCESSORS = 256;
constexpr int BLOCK_THREADS = 128;
constexpr int WARP_THREADS = 32;
constexpr int ROWS_STEP = 16;
constexpr int ACCESS_BYTES = 16;

struct Grid {
    int x, y, z;
};

constexpr int ceiling(long long count, int size) { return static_cast<int>((count + size - 1) / size); }

constexpr int element_bytes(Dtype dtype) { return dtype == Dtype::FLOAT32 ? 4 : 2; }

constexpr bool has_kernels(int head_dim) {
    return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

struct WriteShape {
    Dtype dtype;
    int batch, heads, capacity, rows, head_dim;

    int vectors() const { return head_dim * element_bytes(dtype) / ACCESS_BYTES; }
    Grid grid() const { return {ceiling(static_cast<long long>(rows) * vectors(), BLOCK_THREADS), batch * heads, 1}; }
};

struct AttentionShape {
    Dtype dtype;
    int batch, heads, kv_heads, block, capacity, head_dim;
    long long window;
};

struct AttentionPlan {
    int query_rows, tile_rows, row_tiles, splits;
    size_t shared_bytes;
    Grid attend, merge;  // merge is launched where splits > 1

    static AttentionPlan of(const AttentionShape& shape, int multiprocessors) {
        const int row_bytes = shape.head_dim * element_bytes(shape.dtype);
        const int tile_keys = row_bytes > 512 ? 16 : 32;
        AttentionPlan plan{};
        plan.query_rows = shape.heads / shape.kv_heads * shape.block;
        plan.row_tiles = ceiling(plan.query_rows, shape.head_dim > 128 ? 32 : 64);
        plan.tile_rows = ceiling(plan.query_rows, plan.row_tiles * ROWS_STEP) * ROWS_STEP;
        const int wanted = 2 * multiprocessors / (shape.batch * shape.kv_heads * plan.row_tiles);
        const long long keys = std::min<long long>(shape.capacity, shape.window) + shape.block;
        plan.splits = std::max(1, std::min(wanted, ceiling(keys, tile_keys)));
        plan.shared_bytes = static_cast<size_t>(plan.tile_rows + 2 * tile_keys) * static_cast<size_t>(row_bytes + ACCESS_BYTES) +
                            static_cast<size_t>(plan.tile_rows) * static_cast<size_t>(tile_keys + 8) * sizeof(float);
        plan.attend = {plan.splits, shape.kv_heads * plan.row_tiles, shape.batch};
        const long long all_rows = static_cast<long long>(shape.batch) * shape.heads * shape.block;
        plan.merge = {ceiling(all_rows, BLOCK_THREADS / WARP_THREADS), 1, 1};
        return plan;
    }
};

inline size_t workspace_bytes(const AttentionShape& shape, int multiprocessors) {
    const int splits = AttentionPlan::of(shape, multiprocessors).splits;
    const size_t rows = static_cast<size_t>(shape.batch) * static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.block);
    return splits == 1 ? 0 : rows * static_cast<size_t>(splits) * static_cast<size_t>(shape.head_dim + 2) * sizeof(float);
}

// At most, on any device and at any batch up to that of the shape: small batches are split more.
inline size_t largest_workspace(AttentionShape shape) {
    size_t most = 0;
    for (; shape.batch >= 1; --shape.batch) most = std::max(most, workspace_bytes(shape, MOST_MULTIPROCESSORS));
    return most;
}

}  // namespace launches
}  // namespace dspark
