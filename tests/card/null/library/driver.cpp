// libcuda: what Triton's launcher, PyTorch's expandable segments and NVRTC's kernels ask of the driver.
#include "null_card.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <string>

#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

namespace {

// Physical memory, as cuMemCreate hands it out, is a size on a card; no address belongs to it.
struct Block {
    size_t size;
    int number;
};
std::mutex& lock = *new std::mutex;
auto& blocks = *new std::map<CUmemGenericAllocationHandle, Block>;
constexpr size_t GRANULARITY = 2 << 20;

CUresult launched(CUfunction kernel) { return launch(kernel) ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU; }

}  // namespace

#define DONE(declaration) \
    CUresult declaration { return CUDA_SUCCESS; }

extern "C" {

// Devices and contexts: one of each card, always current
DONE(cuInit(unsigned))
CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION_ANSWERED;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    *count = card_count();
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
    *value = attribute(which);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* text, int size, CUdevice) {
    snprintf(text, size, "%s", card().name);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = CUcontext(0x55);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
DONE(cuCtxSetCurrent(CUcontext))
DONE(cuCtxPushCurrent(CUcontext))
DONE(cuCtxPopCurrent(CUcontext*))
DONE(cuCtxSetLimit(CUlimit, size_t))
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
    *value = 8 << 20;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the null card";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }

// Modules: Triton's and NVRTC's kernels
CUresult cuModuleLoadData(CUmodule* module, const void*) {
    *module = new_handle<CUmodule>();
    record("module");
    return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, image);
}
DONE(cuModuleUnload(CUmodule))
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = new_handle<CUfunction>();
    name_kernel(*function, name);
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
DONE(cuFuncSetAttribute(CUfunction, CUfunction_attribute, int))
DONE(cuFuncSetCacheConfig(CUfunction, CUfunc_cache))
CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void**, void**) {
    return launched(kernel);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction kernel, void**, void**) { return launched(kernel); }
CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream, void**) {
    return launched(kernel);
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    *clusters = 8;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) {
    *count = 2;
    return CUDA_SUCCESS;
}
DONE(cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill))

// Memory by address range and physical block, for expandable segments
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
    Range range = find_range(reinterpret_cast<void*>(address));
    switch (which) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = range.number; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) = range.kind == Kind::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return range.kind == Kind::pageable ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *size = GRANULARITY;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* begin, size_t size, size_t, CUdeviceptr, unsigned long long) {
    void* space = address_space(size);
    if (!space) return CUDA_ERROR_OUT_OF_MEMORY;
    add_range(space, {size, Kind::device, current_card()});
    record("reserve %zu", size);
    *begin = CUdeviceptr(space);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr begin, size_t size) {
    remove_range(reinterpret_cast<void*>(begin));
    release_address_space(reinterpret_cast<void*>(begin), size);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
    if (!take(size)) {
        record("out-of-memory %zu", size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = next_handle();
    std::lock_guard guard(lock);
    blocks[*handle] = {size, current_card()};
    record("create %zu", size);
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    std::lock_guard guard(lock);
    if (auto found = blocks.find(handle); found != blocks.end()) {
        give_back(found->second.size, found->second.number);
        record("release %zu", found->second.size);
        blocks.erase(found);
    }
    return CUDA_SUCCESS;
}
DONE(cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))
DONE(cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))
CUresult cuMemUnmap(CUdeviceptr begin, size_t size) {
    madvise(reinterpret_cast<void*>(begin), size, MADV_REMOVE);
    return CUDA_SUCCESS;
}
}
