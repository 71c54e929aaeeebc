// libnvidia-ml: the gauges that a run reads. Declared here, for no package brings nvml.h; 0 is success.
#include "null_card.h"

#include <cstdio>

struct Rates {
    unsigned card, memory;  // per cent
};

extern "C" {

int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "an error of the null card's NVML"; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
    snprintf(text, size, "none: a null card");
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = unsigned(card_count());
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = reinterpret_cast<void*>(uintptr_t(0x9000 + index));
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {  // as cudaDeviceGetPCIBusId writes it
    unsigned bus = 1;
    sscanf(address, "%*x:%x", &bus);
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // the caller has written "no fabric" into it
int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
    snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", unsigned(uintptr_t(device)));
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {  // for PyTorch's message when memory is out
    *count = 0;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void*, Rates* rates) {
    record("nvml utilization");
    *rates = {97, 40};
    return 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
    record("nvml power");
    *milliwatts = 287500;
    return 0;
}
int nvmlDeviceGetTemperature(void*, int, unsigned* degrees) {
    *degrees = 55;
    return 0;
}
}
