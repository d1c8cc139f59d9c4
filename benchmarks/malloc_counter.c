/* Counts the bytes that a process has allocated: LD_PRELOADed, it stands before glibc's allocator.
 *
 * Repeatable where resident memory is not, because it does not see what the allocator keeps after a free. It sees the
 * buffers of kernels and of gloo too. It does not see memory mapped directly, such as Python's arenas of small objects.
 */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

/* Smaller blocks are too many to count without slowing the process, and too small to matter. */
static const size_t SMALLEST_COUNTED = 2048;

static _Atomic long current_bytes, peak_bytes;

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static long counted(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    return size < SMALLEST_COUNTED ? 0 : (long)size;
}

static void add(long size) {
    if (size == 0) return;
    long now = atomic_fetch_add(&current_bytes, size) + size;
    long peak = atomic_load(&peak_bytes);
    while (now > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, now)) {}
}

static void *taken(void *block) {
    add(counted(block));
    return block;
}

void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *block = taken(__libc_memalign(alignment, size));
    if (block == NULL) return ENOMEM;
    *out = block;
    return 0;
}

void *realloc(void *block, size_t size) {
    long before = counted(block);
    void *moved = __libc_realloc(block, size);
    /* Where it failed, the old block is still there; of size 0 it was freed. */
    if (moved == NULL && size != 0) return NULL;
    atomic_fetch_sub(&current_bytes, before);
    return taken(moved);
}

void free(void *block) {
    atomic_fetch_sub(&current_bytes, counted(block));
    __libc_free(block);
}

long malloc_counter_current(void) { return atomic_load(&current_bytes); }
long malloc_counter_peak(void) { return atomic_load(&peak_bytes); }
void malloc_counter_reset(void) { atomic_store(&peak_bytes, atomic_load(&current_bytes)); }
