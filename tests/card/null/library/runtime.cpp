// libcudart: devices, memory, streams, events, launches.
#include "null_card.h"

#include <cstdio>
#include <cstring>
#include <string>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace {

// PyTorch reads how a `<<<>>>` launch went from here.
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last_error = error; }
cudaError_t launched(const void* kernel) {
    return launch(kernel) ? cudaSuccess : failed(cudaErrorNoKernelImageForDevice);
}

// The time between two events: none, but Triton divides by it when it chooses among kernels.
constexpr float MILLISECONDS = 1.0f;

}  // namespace

// Nothing here overlaps, waits or fails later, so most of what orders work has nothing to do.
#define DONE(declaration) \
    cudaError_t declaration { return cudaSuccess; }

extern "C" {

// Devices
cudaError_t cudaGetDeviceCount(int* count) {
    *count = card_count();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* number) {
    *number = current_card();
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= card_count()) return failed(cudaErrorInvalidDevice);
    set_current_card(number);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDA_VERSION_ANSWERED;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDA_VERSION_ANSWERED;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* answer, int number) {
    if (number < 0 || number >= card_count()) return failed(cudaErrorInvalidDevice);
    const Card& here = card();
    *answer = cudaDeviceProp{};
    snprintf(answer->name, sizeof answer->name, "%s", here.name);
    memset(&answer->uuid, number + 1, sizeof answer->uuid);
    answer->pciBusID = number + 1;
    answer->major = here.major;
    answer->minor = here.minor;
    answer->totalGlobalMem = here.memory;
    answer->multiProcessorCount = here.processors;
    answer->maxThreadsPerMultiProcessor = here.threads;
    answer->sharedMemPerMultiprocessor = here.shared_processor;
    answer->sharedMemPerBlockOptin = here.shared_block;
    answer->l2CacheSize = int(here.l2);
    // The same on every card since Volta.
    answer->sharedMemPerBlock = 48 << 10;
    answer->regsPerBlock = answer->regsPerMultiprocessor = 65536;
    answer->warpSize = 32;
    answer->maxThreadsPerBlock = 1024;
    answer->maxThreadsDim[0] = answer->maxThreadsDim[1] = 1024;
    answer->maxThreadsDim[2] = 64;
    answer->maxGridSize[0] = 2147483647;
    answer->maxGridSize[1] = answer->maxGridSize[2] = 65535;
    answer->totalConstMem = 65536;
    answer->textureAlignment = 512;
    answer->maxBlocksPerMultiProcessor = 16;
    answer->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
    answer->concurrentKernels = answer->unifiedAddressing = answer->managedMemory = answer->canMapHostMemory = 1;
    answer->cooperativeLaunch = 1;
    answer->asyncEngineCount = 2;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    *value = attribute(int(which));
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
    snprintf(text, size, "0000:%02x:00.0", number + 1);
    return cudaSuccess;
}
DONE(cudaDeviceEnablePeerAccess(int, unsigned))
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {  // PyTorch's messages carry these texts
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
        default: return "operation not supported (by the null card)";
    }
}
const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
        default: return "cudaErrorNotSupported";
    }
}

// Memory
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    *total = card().memory;
    *free_bytes = card().memory - CONTEXT - used(current_card());
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** begin, size_t size) {
    if (!take(size)) {
        record("out-of-memory %zu", size);
        return failed(cudaErrorMemoryAllocation);
    }
    *begin = address_space(size);
    if (!*begin) return cudaErrorMemoryAllocation;
    add_range(*begin, {size, Kind::device, current_card()});
    record("malloc %zu", size);
    return cudaSuccess;
}
cudaError_t cudaFree(void* begin) {
    if (Range range = remove_range(begin); range.size) {
        release_address_space(begin, range.size);
        give_back(range.size, range.number);
        record("free %zu", range.size);
    }
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** begin, size_t size, cudaStream_t) { return cudaMalloc(begin, size); }
cudaError_t cudaFreeAsync(void* begin, cudaStream_t) { return cudaFree(begin); }
cudaError_t cudaHostAlloc(void** begin, size_t size, unsigned) {
    *begin = address_space(size);
    if (!*begin) return cudaErrorMemoryAllocation;
    add_range(*begin, {size, Kind::pinned, 0});
    record("pin %zu", size);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* begin) {
    if (Range range = remove_range(begin); range.size) release_address_space(begin, range.size);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* begin, size_t size, unsigned) {
    add_range(begin, {size, Kind::pinned, 0});
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* begin) {
    remove_range(begin);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* answer, const void* address) {
    Range range = find_range(address);
    *answer = cudaPointerAttributes{};
    answer->device = range.number;
    if (range.kind == Kind::pageable) {
        answer->type = cudaMemoryTypeUnregistered;
        return cudaSuccess;
    }
    answer->type = range.kind == Kind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    answer->devicePointer = const_cast<void*>(address);
    answer->hostPointer = range.kind == Kind::pinned ? const_cast<void*>(address) : nullptr;
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    copy(to, from, size, "waiting");
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
    copy(to, from, size, "queued");
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
    copy(to, from, size, "queued");
    return cudaSuccess;
}
cudaError_t cudaMemset(void* begin, int value, size_t size) {
    record("set %zu", size);
    if (size <= (1 << 20)) memset(begin, value, size);  // more would only make memory real
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* begin, int value, size_t size, cudaStream_t) { return cudaMemset(begin, value, size); }

// Streams and events. A wait of the host for the card is what the trace calls a sync.
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = new_handle<cudaStream_t>();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    record("sync stream");
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    record("sync device");
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    record("sync event");
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new_handle<cudaEvent_t>();
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = MILLISECONDS;
    return cudaSuccess;
}
DONE(cudaStreamDestroy(cudaStream_t))
DONE(cudaStreamQuery(cudaStream_t))
DONE(cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned))
DONE(cudaEventDestroy(cudaEvent_t))
DONE(cudaEventQuery(cudaEvent_t))
DONE(cudaEventRecord(cudaEvent_t, cudaStream_t))
DONE(cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned))
DONE(cudaProfilerStart())
DONE(cudaProfilerStop())
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* value, unsigned) {
    call(stream, cudaSuccess, value);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* value) {
    call(value);
    return cudaSuccess;
}

// CUDA graphs are not simulated; PyTorch asks before many things whether one is being captured.
DONE(cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*))
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

// Kernels. A program registers its own by name when it is loaded.
void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    name_kernel(host, name);
}
// What `kernel<<<grid, block>>>()` compiles to: the dimensions are pushed, then popped by the launch.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = *block = dim3{1, 1, 1};
    *shared = 0;
    *static_cast<void**>(stream) = nullptr;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = cudaKernel_t(host);
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launched(kernel);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launched(kernel); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launched(kernel); }
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launched(kernel);
}
DONE(cudaFuncSetAttribute(const void*, cudaFuncAttribute, int))
DONE(cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int))
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* answer, const void*) {
    *answer = cudaFuncAttributes{};
    answer->maxThreadsPerBlock = 1024;
    answer->numRegs = 32;
    // PyTorch's wheels have no code of their own for 8.9: a card of it runs 8.6's.
    const int minor = card().major == 8 && card().minor == 9 ? 6 : card().minor;
    answer->binaryVersion = answer->ptxVersion = card().major * 10 + minor;
    answer->maxDynamicSharedSizeBytes = int(card().shared_block);
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static void* const symbols = address_space(1 << 20);
    *address = symbols;
    return cudaSuccess;
}

// PyTorch asks by name for what it takes from the driver.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (!*function) {  // a machine without it fails when it is called, not when it is asked for
        record("not-simulated %s", name);
        *function = reinterpret_cast<void*>(+[]() { return cudaErrorNotSupported; });
    }
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
}
