/* Two GPUs that compute nothing, for torch's CUDA build on a machine without a driver. Preload it: LD_PRELOAD=null_gpu.so.

   Device memory is zeroed host memory. Copies are made; kernels and products of cuBLAS succeed without doing anything. All else on the
   host's side of CUDA is torch's own: dispatch, allocator, streams, events, captures, and autograd's threads, one a device.

   null_gpu_calls(name) counts the calls of a function, null_gpu_calls("") all calls that need a driver, null_gpu_waits() those that make
   the host wait. While a stream is captured, what waits is refused as CUDA refuses it. */

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 2
#define KINDS 512
#define PINNED 512

static struct { const char *name; int calls; } counted[KINDS];
static int waits;
static cudaStream_t captured; /* the stream that is captured, if one is */
static unsigned long long captures;
static _Thread_local int current;
static _Thread_local cudaError_t last;
static _Thread_local enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

static void count(const char *name) {
    int i = 0;
    while (i < KINDS - 1 && counted[i].name != NULL && strcmp(counted[i].name, name) != 0) i++;
    counted[i].name = name;
    __atomic_add_fetch(&counted[i].calls, 1, __ATOMIC_RELAXED);
}

int null_gpu_calls(const char *name) {
    int total = 0;
    for (int i = 0; i < KINDS && counted[i].name != NULL; i++)
        if (*name == 0 || strcmp(counted[i].name, name) == 0) total += counted[i].calls;
    return total;
}

int null_gpu_waits(void) { return waits; }

/* While a stream is captured the host may wait for another one only, and only where it says so, as torch does for its generators. */
static cudaError_t wait_for(cudaStream_t stream) {
    waits++;
    int permitted = captured == NULL || (stream != captured && mode == cudaStreamCaptureModeRelaxed);
    return last = permitted ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

#define CALL count(__func__)
#define DONE(declaration) cudaError_t declaration { CALL; return cudaSuccess; }
#define WAITS(declaration) cudaError_t declaration { CALL; return wait_for(captured); }

static int nothing(void) { CALL; return 0; }

static int primary_context(int device, unsigned *flags, int *active) {
    CALL;
    *flags = 0; *active = 1;
    return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *function = strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0 ? (void *)primary_context : (void *)nothing;
    if (found != NULL) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* --- devices */
cudaError_t cudaGetDeviceCount(int *found) { CALL; *found = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { CALL; *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { CALL; current = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { CALL; *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) { CALL; *value = 1; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { CALL; *can = 1; return cudaSuccess; }
DONE(cudaDeviceEnablePeerAccess(int peer, unsigned flags))
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) { CALL; snprintf(id, length, "0000:0%d:00.0", device); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { CALL; *least = 0; *greatest = -5; return cudaSuccess; }
WAITS(cudaDeviceSynchronize(void))
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    CALL;
    memset(found, 0, sizeof *found);
    strcpy(found->name, "a GPU that computes nothing");
    found->major = 9;
    found->totalGlobalMem = 8ull << 30;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = found->sharedMemPerMultiprocessor = 227 << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->l2CacheSize = 50 << 20;
    for (int i = 0; i < 3; i++) { found->maxThreadsDim[i] = 1024; found->maxGridSize[i] = 65535; }
    return cudaSuccess;
}

/* --- memory */
static cudaError_t memory(void **to, size_t bytes) {
    *to = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (*to == NULL) return cudaErrorMemoryAllocation;
    memset(*to, 0, bytes);
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **to, size_t bytes) { CALL; return memory(to, bytes); }
static struct { char *at; size_t bytes; } pinned[PINNED];
cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned flags) {
    CALL;
    int i = 0;
    while (i < PINNED && pinned[i].at != NULL) i++;
    cudaError_t error = i < PINNED ? memory(to, bytes) : cudaErrorMemoryAllocation;
    if (error == cudaSuccess) pinned[i].at = *to, pinned[i].bytes = bytes;
    return error;
}
cudaError_t cudaFree(void *at) { CALL; free(at); return cudaSuccess; }
cudaError_t cudaFreeHost(void *at) {
    CALL;
    for (int i = 0; i < PINNED; i++)
        if (pinned[i].at == at) pinned[i].at = NULL;
    free(at);
    return cudaSuccess;
}
DONE(cudaHostRegister(void *at, size_t bytes, unsigned flags))
DONE(cudaHostUnregister(void *at))
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { CALL; *available = *total = 8ull << 30; return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    CALL; memmove(to, from, bytes); return wait_for(captured);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    CALL; memmove(to, from, bytes); return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, cudaStream_t stream) {
    CALL; memmove(to, from, bytes); return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) { CALL; memset(at, value, bytes); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) { CALL; memset(at, value, bytes); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    CALL;
    memset(found, 0, sizeof *found); /* the host's, and not pinned */
    for (int i = 0; i < PINNED; i++)
        if (pinned[i].at != NULL && (char *)at >= pinned[i].at && (char *)at < pinned[i].at + pinned[i].bytes) found->type = cudaMemoryTypeHost;
    return cudaSuccess;
}

/* --- streams and events */
static cudaError_t token(void **to) { *to = malloc(1); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *to) { CALL; return token((void **)to); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags) { CALL; return token((void **)to); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned flags, int priority) { CALL; return token((void **)to); }
DONE(cudaStreamDestroy(cudaStream_t stream))
DONE(cudaStreamQuery(cudaStream_t stream))
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { CALL; return wait_for(stream); }
DONE(cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags))
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *other) {
    enum cudaStreamCaptureMode was = mode;
    mode = *other;
    *other = was;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *to) { CALL; return token((void **)to); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned flags) { CALL; return token((void **)to); }
DONE(cudaEventDestroy(cudaEvent_t event))
DONE(cudaEventRecord(cudaEvent_t event, cudaStream_t stream))
DONE(cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags))
DONE(cudaEventQuery(cudaEvent_t event))
WAITS(cudaEventSynchronize(cudaEvent_t event))
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { CALL; *ms = 1.0f; return cudaSuccess; }

/* --- kernels */
DONE(cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream))
DONE(cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments))
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    CALL; memset(found, 0, sizeof *found); found->maxThreadsPerBlock = 1024; found->binaryVersion = found->ptxVersion = 90; return cudaSuccess;
}
DONE(cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute what, int value))
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int size, size_t shared, unsigned flags) {
    CALL; *blocks = 2; return cudaSuccess;
}
DONE(__cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream))
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) { cudaError_t was = last; last = cudaSuccess; return was; }

/* --- captures: a graph is a token, too */
static cudaError_t status_of(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captured != NULL && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { return status_of(stream, status); }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
    const cudaGraphEdgeData **edges, size_t *many
) {
    if (id != NULL) *id = captures;
    return status_of(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode kind) {
    CALL;
    if (stream == NULL || captured != NULL) return last = cudaErrorStreamCaptureUnsupported;
    captured = stream;
    captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    CALL;
    captured = NULL;
    return token((void **)graph);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags) { CALL; return token((void **)to); }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *many) { CALL; *many = 1; return cudaSuccess; }
DONE(cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream))
DONE(cudaGraphDestroy(cudaGraph_t graph))
DONE(cudaGraphExecDestroy(cudaGraphExec_t graph))

/* --- cuBLAS: handles are tokens, products do nothing */
#define LIBRARY(name) int name(void) { CALL; return 0; }
int cublasCreate_v2(void **to) { CALL; token(to); return 0; }
int cublasLtCreate(void **to) { CALL; token(to); return 0; }
LIBRARY(cublasDestroy_v2) LIBRARY(cublasLtDestroy) LIBRARY(cublasSetStream_v2) LIBRARY(cublasSetWorkspace_v2) LIBRARY(cublasSetMathMode)
LIBRARY(cublasSetPointerMode_v2) LIBRARY(cublasSgemm_v2) LIBRARY(cublasDgemm_v2) LIBRARY(cublasGemmEx) LIBRARY(cublasSgemmStridedBatched)
LIBRARY(cublasGemmStridedBatchedEx) LIBRARY(cublasGemmBatchedEx) LIBRARY(cublasSgemmEx) LIBRARY(cublasSdot_v2) LIBRARY(cublasSgemv_v2) LIBRARY(cublasLtMatmul)
LIBRARY(cublasLtMatmulPreferenceInit_internal) LIBRARY(cublasLtMatmulDescInit_internal) LIBRARY(cublasLtMatrixLayoutInit_internal)
int cublasGetMathMode(void *handle, int *mode) { CALL; *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { CALL; *mode = 0; return 0; }
int cublasLtMatmulDescCreate(void **to, int a, int b) { CALL; token(to); return 0; }
int cublasLtMatrixLayoutCreate(void **to, int a, long b, long c, long d) { CALL; token(to); return 0; }
int cublasLtMatmulPreferenceCreate(void **to) { CALL; token(to); return 0; }
LIBRARY(cublasLtMatmulDescDestroy) LIBRARY(cublasLtMatrixLayoutDestroy) LIBRARY(cublasLtMatmulPreferenceDestroy)
LIBRARY(cublasLtMatmulDescSetAttribute) LIBRARY(cublasLtMatrixLayoutSetAttribute) LIBRARY(cublasLtMatmulPreferenceSetAttribute)
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int wanted, void *found, int *returned) {
    CALL; memset(found, 0, 96); *returned = 1; return 0;
}

/* --- the driver, by name */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return primary_context(device, flags, active); }
int cuCtxGetCurrent(void **context) { CALL; *context = &current; return 0; }
LIBRARY(cuCtxSetCurrent) LIBRARY(cuDeviceGet) LIBRARY(cuDeviceGetAttribute) LIBRARY(cuDevicePrimaryCtxRetain) LIBRARY(cuFuncGetAttribute)
LIBRARY(cuFuncSetAttribute) LIBRARY(cuFuncSetCacheConfig) LIBRARY(cuGetErrorString) LIBRARY(cuLaunchCooperativeKernel) LIBRARY(cuLaunchKernel)
LIBRARY(cuLinkAddData_v2) LIBRARY(cuLinkComplete) LIBRARY(cuLinkCreate_v2) LIBRARY(cuModuleGetFunction) LIBRARY(cuModuleLoad)
LIBRARY(cuModuleLoadData) LIBRARY(cuModuleLoadDataEx) LIBRARY(cuModuleUnload) LIBRARY(cuOccupancyMaxActiveBlocksPerMultiprocessor)
LIBRARY(cuPointerGetAttribute) LIBRARY(cuTensorMapEncodeTiled)
