// What the kernels use of CUDA C++, for a host compiler: the same sources then run on the CPU, one fiber a thread.
//
// Knows the language, not the kernels. Include before them and link with fibers.cpp, which must be compiled without sanitizers: what it
// does between two threads of a block would otherwise order them. Shared memory is dynamic only (`dspark::dynamic_shared`).
#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#define __global__ inline
#define __device__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace emulate {

struct Index {
    unsigned x, y, z;
};

const Index& thread_index();
const Index& block_index();
const Index& block_size();
const Index& grid_size();
void wait_for_block();
void wait_for_warp();
unsigned exchange(unsigned value, unsigned lane_mask);  // the value of the lane whose number differs by lane_mask
void* shared_memory();

// Runs every block of a grid. False: threads wait at barriers that the others never reach.
bool run(Index grid, Index block, size_t shared_bytes, void (*kernel)(void*), void* context);

}  // namespace emulate

#define threadIdx (emulate::thread_index())
#define blockIdx (emulate::block_index())
#define blockDim (emulate::block_size())
#define gridDim (emulate::grid_size())

inline void __syncthreads() { emulate::wait_for_block(); }
inline void __syncwarp() { emulate::wait_for_warp(); }

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }

inline float __shfl_xor_sync(unsigned, float value, int lane_mask) {
    return __uint_as_float(emulate::exchange(__float_as_uint(value), static_cast<unsigned>(lane_mask)));
}

namespace dspark {

inline void* dynamic_shared() { return emulate::shared_memory(); }

inline float float_from_half(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -tiny : tiny;
}

inline unsigned short half_from_float(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000u;
    const float magnitude = fabsf(value);
    if (magnitude != magnitude) return 0x7fff;  // what the device instruction gives
    if (magnitude >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
    if (magnitude < 0x1p-14f) return static_cast<unsigned short>(sign | static_cast<unsigned>(lrintf(magnitude * 0x1p24f)));
    // Rebias the exponent, then round the thirteen low bits off to even; a carry moves into the exponent, as it should.
    const unsigned bits = __float_as_uint(magnitude) - (112u << 23);
    return static_cast<unsigned short>(sign | (bits + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

inline unsigned short bfloat16_from_float(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace dspark
