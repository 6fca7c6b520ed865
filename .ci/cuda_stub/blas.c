/* Of cuBLAS only what must give something back; every product is a function that does nothing. */
#include <stdlib.h>

static int handle(void **made) { *made = calloc(1, 64); return *made ? 0 : 3; }
#ifdef CUBLAS
int cublasCreate_v2(void **made) { return handle(made); }
const char *cublasGetStatusName(int status) { return "stub"; }
const char *cublasGetStatusString(int status) { return "stub"; }
#else
int cublasLtCreate(void **made) { return handle(made); }
#endif
