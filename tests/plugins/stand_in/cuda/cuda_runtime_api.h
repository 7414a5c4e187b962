// A stand-in for CUDA's header of this name, where CUDA is not installed: the one type that plugins/cpp/kernels.h names.
#pragma once

typedef struct CUstream_st* cudaStream_t;
