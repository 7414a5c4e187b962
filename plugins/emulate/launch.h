// One C entry point a kernel, with the arguments of cuLaunchKernel: addresses of the argument values.
//
// Knows how to spread an array of addresses over a kernel's parameters, not the kernels.
#pragma once

#include "cuda.h"

#include <utility>

namespace emulate {

template <typename... Parameters>
struct Call {
    void (*kernel)(Parameters...);
    void** arguments;

    template <size_t... I>
    void spread(std::index_sequence<I...>) const {
        kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[I])...);
    }

    static void run(void* self) { static_cast<Call*>(self)->spread(std::index_sequence_for<Parameters...>()); }
};

template <typename... Parameters>
bool launch(void (*kernel)(Parameters...), const unsigned* grid, const unsigned* block, size_t shared_bytes, void** arguments) {
    Call<Parameters...> call{kernel, arguments};
    return run({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, &Call<Parameters...>::run, &call);
}

}  // namespace emulate

#define EMULATE_KERNEL(entry, ...)                                                                                    \
    extern "C" bool entry(const unsigned* grid, const unsigned* block, size_t shared_bytes, void** arguments) {       \
        return emulate::launch(__VA_ARGS__, grid, block, shared_bytes, arguments);                                    \
    }
