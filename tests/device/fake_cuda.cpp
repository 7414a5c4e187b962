// A libcuda without a device: a "module" is the path of a library of emulated kernels, and a launch runs one of them at once.
//
// Knows the seven calls that driver.py makes, with the types of cuda.h. What it was told is kept for the test.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

namespace {
using Entry = bool (*)(const unsigned* grid, const unsigned* block, size_t shared_bytes, void** arguments);
int context = 0, refused = 0, multiprocessors = 1;
}  // namespace

extern "C" {
long launches = 0, allowed_shared = 0;
uint64_t last_stream = 0;

void fake_set(int refuse, int count, int device) { refused = refuse, multiprocessors = count, context = device; }

int cuGetErrorName(int code, const char** name) {
    *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    return 0;
}
int cuCtxGetDevice(int* device) {
    *device = context;
    return context < 0 ? 201 : 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 16 ? multiprocessors : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return 0;
}
int cuModuleLoadData(void** module, const void* image) {
    *module = dlopen(static_cast<const char*>(image), RTLD_NOW);
    return *module == nullptr ? 200 : 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, name);
    return *function == nullptr ? 500 : 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
    if (attribute == 8) allowed_shared = value;
    return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                   void* stream, void** arguments, void** extra) {
    if (refused != 0 || extra != nullptr || (shared_bytes > 48 << 10 && shared_bytes > allowed_shared)) return 701;
    const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    ++launches;
    last_stream = reinterpret_cast<uint64_t>(stream);
    return reinterpret_cast<Entry>(function)(grid, block, shared_bytes, arguments) ? 0 : 719;
}
}
