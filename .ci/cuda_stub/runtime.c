/* The CUDA runtime without a GPU: memory and copies are real, kernels do nothing.
 *
 * Device memory is mapped twice. The address that a caller gets allows no access, so that host code which touches it
 * dies of SIGSEGV; copies go through the second mapping of the same pages. A copy whose ends are not the kind of memory
 * that its direction says, or that runs over an end, is printed and counted as `bad`. When the process ends, one JSON
 * line of counts is appended to the file that CUDA_STUB_COUNTS names.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };
enum direction { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS, DIRECTIONS };
enum kind { ON_HOST, ON_DEVICE, EITHER };

#define PAGE 4096UL
#define GIB (1UL << 30)
#define FREE_BYTES (130 * GIB)
#define ALL_BYTES (140 * GIB)

struct dim3 { unsigned x, y, z; };

struct block { char *at, *pages; size_t size; };

static struct block *blocks;
static size_t num_blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    long bad, launches, graph_launches, synchronisations, allocations;
    long copies[DIRECTIONS];
    size_t allocated, bytes[DIRECTIONS], largest[DIRECTIONS];
} counts;

static void complain(const char *what, const void *address, size_t size) {
    counts.bad++;
    fprintf(stderr, "cuda stub: BAD: %s: %p, %zu bytes\n", what, address, size);
}

static struct block *block_of(const char *address) {
    for (size_t i = 0; i < num_blocks; i++)
        if (address >= blocks[i].at && address < blocks[i].at + blocks[i].size) return &blocks[i];
    return NULL;
}

/* Where the bytes at `address` can be read and written. */
static void *reachable(const void *address, size_t size, enum kind expected) {
    pthread_mutex_lock(&lock);
    struct block *block = block_of(address);
    void *found = block ? block->pages + ((char *)address - block->at) : (void *)address;
    if (block && (char *)address + size > block->at + block->size)
        complain("a copy runs over the end of device memory", address, size);
    pthread_mutex_unlock(&lock);
    if (size && expected == ON_DEVICE && !block) complain("device memory is expected here", address, size);
    if (size && expected == ON_HOST && block) complain("host memory is expected here", address, size);
    return found;
}

static int copy(void *target, const void *source, size_t size, int direction) {
    if (direction < 0 || direction > BY_ADDRESS) direction = BY_ADDRESS;
    counts.copies[direction]++;
    counts.bytes[direction] += size;
    if (size > counts.largest[direction]) counts.largest[direction] = size;
    enum kind to = direction == HOST_TO_DEVICE || direction == DEVICE_TO_DEVICE ? ON_DEVICE : ON_HOST;
    enum kind from = direction == DEVICE_TO_HOST || direction == DEVICE_TO_DEVICE ? ON_DEVICE : ON_HOST;
    if (direction == BY_ADDRESS) to = from = EITHER;
    memmove(reachable(target, size, to), reachable(source, size, from), size);
    return SUCCESS;
}

int cudaMalloc(void **address, size_t size) {
    size = ((size ? size : 1) + PAGE - 1) & ~(PAGE - 1);
    int file = memfd_create("device", 0);
    if (file < 0 || ftruncate(file, size)) return OUT_OF_MEMORY;
    char *at = mmap(NULL, size, PROT_NONE, MAP_SHARED, file, 0);
    char *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED || pages == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    blocks = realloc(blocks, (num_blocks + 1) * sizeof *blocks);
    blocks[num_blocks++] = (struct block){at, pages, size};
    counts.allocations++;
    counts.allocated += size;
    pthread_mutex_unlock(&lock);
    *address = at;
    return SUCCESS;
}

int cudaFree(void *address) {
    if (!address) return SUCCESS;
    pthread_mutex_lock(&lock);
    struct block *block = block_of(address);
    int is_whole = block && block->at == address;
    if (is_whole) {
        munmap(block->at, block->size);
        munmap(block->pages, block->size);
        *block = blocks[--num_blocks];
    }
    pthread_mutex_unlock(&lock);
    if (!is_whole) complain("freed, and is no device memory", address, 0);
    return SUCCESS;
}

static int allocate_on_host(void **address, size_t size) {
    return posix_memalign(address, 512, size ? size : 1) ? OUT_OF_MEMORY : SUCCESS;
}
int cudaMallocHost(void **address, size_t size) { return allocate_on_host(address, size); }
int cudaHostAlloc(void **address, size_t size, unsigned flags) { return allocate_on_host(address, size); }
int cudaFreeHost(void *address) { free(address); return SUCCESS; }

int cudaMemcpy(void *target, const void *source, size_t size, int direction) { return copy(target, source, size, direction); }
int cudaMemcpyAsync(void *target, const void *source, size_t size, int direction, void *stream) {
    return copy(target, source, size, direction);
}
int cudaMemset(void *target, int value, size_t size) {
    memset(reachable(target, size, ON_DEVICE), value, size);
    return SUCCESS;
}
int cudaMemsetAsync(void *target, int value, size_t size, void *stream) { return cudaMemset(target, value, size); }
int cudaMemGetInfo(size_t *free_bytes, size_t *all) { *free_bytes = FREE_BYTES; *all = ALL_BYTES; return SUCCESS; }
int cudaPointerGetAttributes(void *attributes, const void *address) { memset(attributes, 0, 32); return SUCCESS; }

int cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return SUCCESS; }
const char *cudaGetErrorName(int error) { return "stub"; }
const char *cudaGetErrorString(int error) { return "stub"; }

/* cudaDeviceAttr of an H200; all others are 1. */
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {
        {1, 1024}, {8, 49152}, {10, 32}, {16, 132}, {39, 2048}, {75, 9}, {76, 0}, {81, 233472}, {97, 232448}, {106, 32},
    };
    *value = 1;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return SUCCESS;
}

/* struct cudaDeviceProp of CUDA 13, the fields that the provider reads, by offset. */
int cudaGetDeviceProperties(char *properties, int device) {
    static const struct { int offset, value; } ints[] = {
        {304, 65536}, {308, 32}, {320, 1024}, {324, 1024}, {328, 1024}, {332, 64}, {336, 2147483647}, {340, 65535},
        {344, 65535}, {360, 9}, {364, 0}, {384, 132}, {596, 62914560}, {604, 2048}, {632, 65536}, {668, 1},
    };
    static const struct { int offset; size_t value; } sizes[] = {
        {288, ALL_BYTES}, {296, 49152}, {352, 65536}, {368, 512}, {624, 233472}, {672, 232448},
    };
    memset(properties, 0, 1008);
    strcpy(properties, "stub of an H200");
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) memcpy(properties + ints[i].offset, &ints[i].value, sizeof(int));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        memcpy(properties + sizes[i].offset, &sizes[i].value, sizeof(size_t));
    return SUCCESS;
}

static int handle(void **made) { *made = calloc(1, 64); return *made ? SUCCESS : OUT_OF_MEMORY; }
int cudaStreamCreate(void **stream) { return handle(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return handle(stream); }
int cudaEventCreate(void **event) { return handle(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return handle(event); }
int cudaStreamEndCapture(void *stream, void **graph) { return handle(graph); }
int cudaGraphInstantiate(void **runnable, void *graph, unsigned long long flags) { return handle(runnable); }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
int cudaStreamSynchronize(void *stream) { counts.synchronisations++; return SUCCESS; }
int cudaDeviceSynchronize(void) { counts.synchronisations++; return SUCCESS; }
int cudaGraphLaunch(void *runnable, void *stream) { counts.graph_launches++; return SUCCESS; }
int cudaFuncGetAttributes(void *attributes, const void *kernel) { memset(attributes, 0, 64); return SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int size, size_t shared,
                                                           unsigned flags) {
    *count = 1;
    return SUCCESS;
}
int cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream) {
    counts.launches++;
    return SUCCESS;
}
int __cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                       void *stream) {
    counts.launches++;
    return SUCCESS;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *registered[8];
    return registered;
}

__attribute__((destructor)) static void write_counts(void) {
    const char *path = getenv("CUDA_STUB_COUNTS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "{\"bad\": %ld, \"launches\": %ld, \"graph_launches\": %ld, \"synchronisations\": %ld, ", counts.bad,
            counts.launches, counts.graph_launches, counts.synchronisations);
    fprintf(file, "\"allocations\": %ld, \"bytes_allocated\": %zu", counts.allocations, counts.allocated);
    static const struct { const char *name; enum direction direction; } rows[] = {
        {"to_device", HOST_TO_DEVICE}, {"to_host", DEVICE_TO_HOST}, {"on_device", DEVICE_TO_DEVICE}, {"other", BY_ADDRESS},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        enum direction direction = rows[i].direction;
        fprintf(file, ", \"%s\": %ld, \"%s_bytes\": %zu, \"%s_largest\": %zu", rows[i].name, counts.copies[direction],
                rows[i].name, counts.bytes[direction], rows[i].name, counts.largest[direction]);
    }
    fprintf(file, "}\n");
    fclose(file);
}

/* The counts since this was last called, for a program that looks at single steps: wrong copies, launches, copies to the
 * device and their bytes, copies to the host, their bytes and the largest of these. */
void cuda_stub_counts(long long *counted) {
    static long long before[6];
    long long now[] = {counts.bad, counts.launches + counts.graph_launches, counts.copies[HOST_TO_DEVICE],
                       (long long)counts.bytes[HOST_TO_DEVICE], counts.copies[DEVICE_TO_HOST],
                       (long long)counts.bytes[DEVICE_TO_HOST]};
    for (int i = 0; i < 6; i++) {
        counted[i] = now[i] - before[i];
        before[i] = now[i];
    }
    counted[6] = (long long)counts.largest[DEVICE_TO_HOST];
    counts.largest[DEVICE_TO_HOST] = 0;
}
