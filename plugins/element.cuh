// Elements of the three dtypes as the kernels see them: bits in memory, float32 in registers, moved 4 to 16 bytes at a time.
//
// Knows the dtypes, not the kernels. Includes nothing: NVRTC has no cuda_fp16.h, and the conversions are one instruction each.
// plugins/emulate/cuda.h supplies the same functions where the compiler is not CUDA's.
#pragma once

namespace dspark {

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

#ifdef __CUDACC__
__device__ inline float float_from_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline unsigned short half_from_float(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline unsigned short bfloat16_from_float(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// A function, so that the emulation can hand out a fresh allocation for each block.
__device__ inline void* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return bytes;
}
#endif

constexpr int VECTOR_BYTES = 16;

// Elements of one 16-byte access.
template <typename Element>
constexpr int VECTOR = VECTOR_BYTES / static_cast<int>(sizeof(Element));

// The unsigned type of an access of BYTES bytes.
template <int BYTES>
struct Access;
template <>
struct Access<4> {
    using type = unsigned;
};
template <>
struct Access<8> {
    using type = uint2;
};
template <>
struct Access<16> {
    using type = uint4;
};

template <int WORDS>
struct Words {
    unsigned word[WORDS];
};

template <int WORDS>
__device__ inline Words<WORDS> load_words(const void* from) {
    const auto loaded = *static_cast<const typename Access<4 * WORDS>::type*>(from);
    Words<WORDS> words;
    if constexpr (WORDS == 1) {
        words.word[0] = loaded;
    } else {
        words.word[0] = loaded.x;
        words.word[1] = loaded.y;
        if constexpr (WORDS == 4) {
            words.word[2] = loaded.z;
            words.word[3] = loaded.w;
        }
    }
    return words;
}

template <int WORDS>
__device__ inline void store_words(void* to, const Words<WORDS>& words) {
    typename Access<4 * WORDS>::type stored;
    if constexpr (WORDS == 1) {
        stored = words.word[0];
    } else {
        stored.x = words.word[0];
        stored.y = words.word[1];
        if constexpr (WORDS == 4) {
            stored.z = words.word[2];
            stored.w = words.word[3];
        }
    }
    *static_cast<typename Access<4 * WORDS>::type*>(to) = stored;
}

__device__ inline void unpack(const float*, unsigned word, float* values) { values[0] = __uint_as_float(word); }

__device__ inline void unpack(const float16*, unsigned word, float* values) {
    values[0] = float_from_half(static_cast<unsigned short>(word));
    values[1] = float_from_half(static_cast<unsigned short>(word >> 16));
}

__device__ inline void unpack(const bfloat16*, unsigned word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
}

__device__ inline unsigned pack(const float*, const float* values) { return __float_as_uint(values[0]); }

__device__ inline unsigned pack(const float16*, const float* values) {
    return half_from_float(values[0]) | static_cast<unsigned>(half_from_float(values[1])) << 16;
}

__device__ inline unsigned pack(const bfloat16*, const float* values) {
    return bfloat16_from_float(values[0]) | static_cast<unsigned>(bfloat16_from_float(values[1])) << 16;
}

// COUNT elements to float32 in one access.
template <int COUNT, typename Element>
__device__ inline void load_floats(const Element* from, float* values) {
    constexpr int PER_WORD = 4 / static_cast<int>(sizeof(Element));
    const auto words = load_words<COUNT / PER_WORD>(from);
#pragma unroll
    for (int w = 0; w < COUNT / PER_WORD; ++w) unpack(from, words.word[w], values + w * PER_WORD);
}

// COUNT elements from float32 in one access, rounded to nearest even.
template <int COUNT, typename Element>
__device__ inline void store_floats(Element* to, const float* values) {
    constexpr int PER_WORD = 4 / static_cast<int>(sizeof(Element));
    Words<COUNT / PER_WORD> words;
#pragma unroll
    for (int w = 0; w < COUNT / PER_WORD; ++w) words.word[w] = pack(to, values + w * PER_WORD);
    store_words(to, words);
}

}  // namespace dspark
