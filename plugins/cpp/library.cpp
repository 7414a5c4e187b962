// What TensorRT asks of a plugin library: getCreators and setLoggerFinder, by which IPluginRegistry::loadLibrary and trtexec's
// --dynamicPlugins register it.
//
// Compiled with DSPARK_REGISTER it registers its plugins when it is loaded instead, for programs that only load a library: LD_PRELOAD,
// trtexec's --staticPlugins, Triton Inference Server. Not both in one library: TensorRT refuses a plugin's second registration.
#include "plugin.h"

#if defined(_WIN32)
#define DSPARK_EXPORT __declspec(dllexport)
#else
#define DSPARK_EXPORT __attribute__((visibility("default")))
#endif

namespace {
dspark::Creator ring_write(dspark::RING_WRITE);
dspark::Creator block_attention(dspark::BLOCK_ATTENTION);
}  // namespace

#ifdef DSPARK_REGISTER

namespace {
// Behind the creators in this file, so that they exist.
const bool registered = getPluginRegistry()->registerCreator(ring_write, dspark::NAMESPACE) &&
                        getPluginRegistry()->registerCreator(block_attention, dspark::NAMESPACE);
}  // namespace

extern "C" DSPARK_EXPORT bool dspark_plugins_registered() { return registered; }

#else

extern "C" DSPARK_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { dspark::set_logger_finder(finder); }

extern "C" DSPARK_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&ring_write, &block_attention};
    count = 2;
    return creators;
}

#endif
