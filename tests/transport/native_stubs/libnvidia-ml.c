// What UCX asks of the management library: one device without NVLink and without fabric.
#define UNSUPPORTED 3

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void*)1;
    return index == 0 ? 0 : 2;
}
int nvmlDeviceGetPciInfo_v3(void) { return UNSUPPORTED; }
int nvmlDeviceGetFieldValues(void) { return UNSUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo(void) { return UNSUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return UNSUPPORTED; }
const char *nvmlErrorString(int error) { (void)error; return "stub"; }
