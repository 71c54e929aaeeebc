// libcublas and libcublasLt: products that are counted.
#include "null_card.h"

#include <cstring>

#include <cublasLt.h>
#include <cublas_v2.h>

namespace {

const char* name_of(cudaDataType type) {
    switch (type) {
        case CUDA_R_32F: return "fp32";
        case CUDA_R_16F: return "fp16";
        case CUDA_R_16BF: return "bf16";
        case CUDA_R_8I: return "int8";
        case CUDA_R_32I: return "int32";
        case CUDA_R_64F: return "fp64";
        default: return "other";
    }
}

cublasStatus_t product(long m, long n, long k, long count, cudaDataType in, cudaDataType out) {
    record("product %ld %ld %ld %ld %s %s", m, n, k, count, name_of(in), name_of(out));
    return CUBLAS_STATUS_SUCCESS;
}

// cublasLt's objects are opaque and caller-owned or made by a Create; only a layout says something that is counted.
struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    int32_t count;
};

}  // namespace

#define DONE(declaration) \
    cublasStatus_t declaration { return CUBLAS_STATUS_SUCCESS; }

extern "C" {

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    *handle = new_handle<cublasHandle_t>();
    return CUBLAS_STATUS_SUCCESS;
}
DONE(cublasDestroy(cublasHandle_t))
DONE(cublasSetStream(cublasHandle_t, cudaStream_t))
DONE(cublasSetWorkspace(cublasHandle_t, void*, size_t))
DONE(cublasSetMathMode(cublasHandle_t, cublasMath_t))
DONE(cublasSetPointerMode(cublasHandle_t, cublasPointerMode_t))
DONE(cublasSetSmCountTarget(cublasHandle_t, int))
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode(cublasHandle_t, cublasPointerMode_t* mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*,
                            const void*, cudaDataType in, int, const void*, cudaDataType, int, const void*, void*,
                            cudaDataType out, int, cublasComputeType_t, cublasGemmAlgo_t) {
    return product(m, n, k, 1, in, out);
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                          const void*, const void*, cudaDataType in, int, long long, const void*,
                                          cudaDataType, int, long long, const void*, void*, cudaDataType out, int,
                                          long long, int count, cublasComputeType_t, cublasGemmAlgo_t) {
    return product(m, n, k, count, in, out);
}
cublasStatus_t cublasSgemm(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*,
                           const float*, int, const float*, int, const float*, float*, int) {
    return product(m, n, k, 1, CUDA_R_32F, CUDA_R_32F);
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                         const float*, const float*, int, long long, const float*, int, long long,
                                         const float*, float*, int, long long, int count) {
    return product(m, n, k, count, CUDA_R_32F, CUDA_R_32F);
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = new_handle<cublasLtHandle_t>();
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t) {
    *made = new_handle<cublasLtMatmulDesc_t>();
    return CUBLAS_STATUS_SUCCESS;
}
DONE(cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*, size_t))
DONE(cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t))
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
    *made = new_handle<cublasLtMatmulPreference_t>();
    return CUBLAS_STATUS_SUCCESS;
}
DONE(cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*,
                                          size_t))
DONE(cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t))
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t) {
    *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, 1});
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which,
                                                const void* value, size_t) {
    if (which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
        reinterpret_cast<Layout*>(layout)->count = *static_cast<const int32_t*>(value);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete reinterpret_cast<Layout*>(layout);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
    results[0] = cublasLtMatmulHeuristicResult_t{};
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t a,
                              const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*,
                              cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
    auto* left = reinterpret_cast<Layout*>(a);
    auto* out = reinterpret_cast<Layout*>(d);
    long inner = long(left->rows * left->columns / out->rows);  // transposed or not
    return product(long(out->rows), long(out->columns), inner, out->count, left->type, out->type);
}
}
