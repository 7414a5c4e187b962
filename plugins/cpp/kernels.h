// The kernels behind plain functions: what plugin.cpp calls on a device. kernels.cu implements them.
//
// Knows pointers, shapes and streams; not TensorRT. Each returns 0, or the number of a CUDA error.
#pragma once

#include <cuda_runtime_api.h>

#include "launches.h"

namespace dspark {
namespace launches {

struct AttentionPointers {
    const void *query, *ring_key, *ring_value, *block_key, *block_value, *total, *first;
    void *attended, *workspace;
};

// Multiprocessors of the current device.
int count_multiprocessors(int* count);

// Allows the kernels of a plan their shared memory. Not needed again until the plan changes.
int prepare_attention(const AttentionShape& shape, const AttentionPlan& plan);

// Only launch: no allocation, no synchronisation.
int launch_write(const WriteShape& shape, void* updated, const void* rows, const void* start, cudaStream_t stream);
int launch_attention(const AttentionShape& shape, const AttentionPlan& plan, float scale, AttentionPointers pointers, cudaStream_t stream);

}  // namespace launches
}  // namespace dspark
