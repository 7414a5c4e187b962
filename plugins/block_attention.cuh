// Kernels of dspark::BlockAttention (plugins/contract.py): softmax over the visible ring slots and all T block rows, in float32.
//
// `block_attention` attends one piece of the keys for one key/value head; all its query rows (group * T, or a tile of them) share
// each key/value tile in shared memory. `merge_splits` joins the pieces where there are several. Both derive the pieces from the same
// numbers, so pieces that a short request does not need are neither written nor read. Hidden slots are never loaded: what lies there,
// NaN included, cannot show.
//
// B requests   G key/value heads   M query rows of a key/value head   T block rows   R ring capacity   S pieces (splits) at most
// query, attended [B,G,M,D]   ring_key, ring_value [B,G,R,D]   block_key, block_value [B,G,T,D]   total, first [B]
// workspace: partial sums [B,G,M,S,D], then largest score and sum of weights [B,G,M,S,2], float32
#pragma once

#include "element.cuh"

namespace dspark {

constexpr int THREADS = 128;
// Blocks of a multiprocessor that registers must allow. Without a number NVRTC spills to fit more, which shared memory does not admit.
constexpr int RESIDENT_BLOCKS = 3;
constexpr int LANES = 8;  // threads of a query row: neighbours in a warp, so that rows are reduced by shuffles
constexpr int ROW_STEP = THREADS / LANES;
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Key rows in shared memory at a time. Half as many for the longest rows, which would not fit with their queries.
template <typename Element, int HEAD_DIM>
constexpr int KEYS = HEAD_DIM * sizeof(Element) > 512 ? 16 : 32;

// The keys of one request in the order of positions: visible ring slots from `oldest_slot` on, then the block.
struct Keys {
    int visible;
    int count;
    int oldest_slot;
    int length;  // of a piece, whole tiles

    __device__ Keys(long long total, long long first, long long window, int capacity, int block, int splits, int tile) {
        long long oldest = first > 0 ? first : 0;
        if (oldest < total - window) oldest = total - window;
        if (oldest < total - capacity) oldest = total - capacity;
        visible = oldest < total ? static_cast<int>(total - oldest) : 0;
        count = visible + block;
        oldest_slot = static_cast<int>(oldest % capacity);
        const int share = (count + splits - 1) / splits;
        length = (share + tile - 1) / tile * tile;
    }
};

// Grid: S pieces along x, G * (tiles of ROWS query rows) along y, B along z. `scale` includes log2(e): weights are powers of two.
template <typename Element, int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    block_attention(const Element* __restrict__ query, const Element* __restrict__ ring_key, const Element* __restrict__ ring_value,
                    const Element* __restrict__ block_key, const Element* __restrict__ block_value, const long long* __restrict__ total,
                    const long long* __restrict__ first, Element* __restrict__ attended, float* __restrict__ workspace, int kv_heads,
                    int query_rows, int block, int capacity, int splits, long long window, float scale) {
    constexpr int TILE = KEYS<Element, HEAD_DIM>;
    constexpr int PER_VECTOR = VECTOR<Element>;
    constexpr int ROW_VECTORS = HEAD_DIM / PER_VECTOR;
    // One vector of padding: eight neighbouring rows then lie in different banks.
    constexpr int STRIDE = HEAD_DIM + PER_VECTOR;
    constexpr int WEIGHT_STRIDE = TILE + LANES;
    // A thread computes OWN_ROWS x OWN_KEYS scores, then OWN_ROWS x OWN_COLUMNS outputs, WIDTH columns an access.
    constexpr int OWN_ROWS = ROWS / ROW_STEP;
    constexpr int OWN_KEYS = TILE / LANES;
    constexpr int OWN_COLUMNS = HEAD_DIM / LANES;
    constexpr int WIDTH = OWN_COLUMNS % PER_VECTOR == 0 ? PER_VECTOR : OWN_COLUMNS % 4 == 0 ? 4 : 2;
    static_assert(ROWS % ROW_STEP == 0 && HEAD_DIM % (2 * LANES) == 0, "rows and columns divide among the threads");

    Element* const queries = static_cast<Element*>(dynamic_shared());
    Element* const keys = queries + ROWS * STRIDE;
    Element* const values = keys + TILE * STRIDE;
    float* const weights = reinterpret_cast<float*>(values + TILE * STRIDE);

    const int request = static_cast<int>(blockIdx.z);
    const Keys range(total[request], first[request], window, capacity, block, splits, TILE);
    const int begin = static_cast<int>(blockIdx.x) * range.length;
    if (begin >= range.count) return;
    const int end = begin + range.length < range.count ? begin + range.length : range.count;

    const long long head = static_cast<long long>(request) * kv_heads + blockIdx.y % kv_heads;
    const int first_row = static_cast<int>(blockIdx.y) / kv_heads * ROWS;
    const long long query_offset = head * query_rows + first_row;
    const int live_rows = query_rows - first_row < ROWS ? query_rows - first_row : ROWS;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % LANES;
    const int row = thread / LANES;

    for (int i = thread; i < ROWS * ROW_VECTORS; i += THREADS) {
        const int r = i / ROW_VECTORS, column = i % ROW_VECTORS * PER_VECTOR;
        Words<4> words = {};
        if (r < live_rows) words = load_words<4>(query + (query_offset + r) * HEAD_DIM + column);
        store_words(queries + r * STRIDE + column, words);
    }

    float sums[OWN_ROWS][OWN_COLUMNS] = {};
    float weight_sum[OWN_ROWS] = {};
    float largest[OWN_ROWS];
    const float lowest = __int_as_float(static_cast<int>(0xff800000u));
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) largest[i] = lowest;

    for (int tile = begin; tile < end; tile += TILE) {
        // Rows past the end are zeros with weight zero.
#pragma unroll 4
        for (int i = thread; i < TILE * ROW_VECTORS; i += THREADS) {
            const int r = i / ROW_VECTORS, column = i % ROW_VECTORS * PER_VECTOR;
            const int index = tile + r;
            Words<4> key = {}, value = {};
            if (index < range.visible && index < end) {
                int slot = range.oldest_slot + index;
                if (slot >= capacity) slot -= capacity;
                const long long offset = (head * capacity + slot) * HEAD_DIM + column;
                key = load_words<4>(ring_key + offset);
                value = load_words<4>(ring_value + offset);
            } else if (index < end) {
                const long long offset = (head * block + index - range.visible) * HEAD_DIM + column;
                key = load_words<4>(block_key + offset);
                value = load_words<4>(block_value + offset);
            }
            store_words(keys + r * STRIDE + column, key);
            store_words(values + r * STRIDE + column, value);
        }
        __syncthreads();

        float scores[OWN_ROWS][OWN_KEYS] = {};
#pragma unroll 1
        for (int column = 0; column < HEAD_DIM; column += PER_VECTOR) {
            float q[OWN_ROWS][PER_VECTOR];
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) load_floats<PER_VECTOR>(queries + (row + i * ROW_STEP) * STRIDE + column, q[i]);
#pragma unroll
            for (int j = 0; j < OWN_KEYS; ++j) {
                float k[PER_VECTOR];
                load_floats<PER_VECTOR>(keys + (lane + j * LANES) * STRIDE + column, k);
#pragma unroll
                for (int i = 0; i < OWN_ROWS; ++i) {
#pragma unroll
                    for (int c = 0; c < PER_VECTOR; ++c) scores[i][j] += q[i][c] * k[c];
                }
            }
        }

#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            float peak = largest[i];
#pragma unroll
            for (int j = 0; j < OWN_KEYS; ++j) {
                scores[i][j] = tile + lane + j * LANES < end ? scores[i][j] * scale : lowest;
                peak = fmaxf(peak, scores[i][j]);
            }
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, step));
            const float shrink = exp2f(largest[i] - peak);
            largest[i] = peak;
            weight_sum[i] *= shrink;
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; ++c) sums[i][c] *= shrink;
#pragma unroll
            for (int j = 0; j < OWN_KEYS; ++j) {
                const float weight = exp2f(scores[i][j] - peak);
                weight_sum[i] += weight;
                weights[(row + i * ROW_STEP) * WEIGHT_STRIDE + lane + j * LANES] = weight;
            }
        }
        __syncwarp();  // the weights of a row are written and read by one warp

#pragma unroll 1
        for (int four = 0; four < TILE; four += 4) {
            float weight[OWN_ROWS][4];
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) load_floats<4>(weights + (row + i * ROW_STEP) * WEIGHT_STRIDE + four, weight[i]);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
                for (int part = 0; part < OWN_COLUMNS; part += WIDTH) {
                    float v[WIDTH];
                    load_floats<WIDTH>(values + (four + k) * STRIDE + part * LANES + lane * WIDTH, v);
#pragma unroll
                    for (int i = 0; i < OWN_ROWS; ++i) {
#pragma unroll
                        for (int c = 0; c < WIDTH; ++c) sums[i][part + c] += weight[i][k] * v[c];
                    }
                }
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) weight_sum[i] += __shfl_xor_sync(ALL_LANES, weight_sum[i], step);
        const int r = row + i * ROW_STEP;
        if (r >= live_rows) continue;
        if (splits == 1) {
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; ++c) sums[i][c] *= 1.0f / weight_sum[i];
#pragma unroll
            for (int part = 0; part < OWN_COLUMNS; part += WIDTH) {
                store_floats<WIDTH>(attended + (query_offset + r) * HEAD_DIM + part * LANES + lane * WIDTH, sums[i] + part);
            }
        } else {
            const long long partial = (query_offset + r) * splits + blockIdx.x;
            const long long partials = static_cast<long long>(gridDim.z) * kv_heads * query_rows * splits;
            constexpr int STORE = WIDTH < 4 ? WIDTH : 4;
#pragma unroll
            for (int part = 0; part < OWN_COLUMNS; part += WIDTH) {
#pragma unroll
                for (int c = 0; c < WIDTH; c += STORE) {
                    store_floats<STORE>(workspace + partial * HEAD_DIM + part * LANES + lane * WIDTH + c, sums[i] + part + c);
                }
            }
            const float statistics[2] = {largest[i], weight_sum[i]};
            if (lane == 0) store_floats<2>(workspace + partials * HEAD_DIM + partial * 2, statistics);
        }
    }
}

// One warp a query row; grid: B*G*M warps along x.
template <typename Element, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS)
    merge_splits(const float* __restrict__ workspace, const long long* __restrict__ total, const long long* __restrict__ first,
                 Element* __restrict__ attended, int all_rows, int request_rows, int block, int capacity, int splits, long long window) {
    const int row = static_cast<int>(blockIdx.x * THREADS + threadIdx.x) / WARP;
    if (row >= all_rows) return;
    const int request = row / request_rows;
    const Keys range(total[request], first[request], window, capacity, block, splits, KEYS<Element, HEAD_DIM>);
    const int pieces = (range.count + range.length - 1) / range.length;
    const long long partial = static_cast<long long>(row) * splits;
    const float* const statistics = workspace + (static_cast<long long>(all_rows) * HEAD_DIM * splits + partial * 2);

    float largest = statistics[0];
    for (int s = 1; s < pieces; ++s) largest = fmaxf(largest, statistics[2 * s]);
    for (int column = static_cast<int>(threadIdx.x) % WARP * 4; column < HEAD_DIM; column += WARP * 4) {
        float merged[4] = {};
        float weight_sum = 0.0f;
        for (int s = 0; s < pieces; ++s) {
            const float weight = exp2f(statistics[2 * s] - largest);
            float sums[4];
            load_floats<4>(workspace + (partial + s) * HEAD_DIM + column, sums);
            weight_sum += weight * statistics[2 * s + 1];
#pragma unroll
            for (int c = 0; c < 4; ++c) merged[c] += weight * sums[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) merged[c] *= 1.0f / weight_sum;
        store_floats<4>(attended + static_cast<long long>(row) * HEAD_DIM + column, merged);
    }
}

}  // namespace dspark
