// Repeats a function without the GIL, and counts the allocations of a thread. It is preloaded, and
// is also a driver without captures, because without one each call would look for it.
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <time.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);

static __thread size_t allocations;

void* malloc(size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* block, size_t bytes) {
  ++allocations;
  return __libc_realloc(block, bytes);
}

int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  return *status = 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  (void)mode;
  return 0;
}

typedef struct {
  size_t allocations;
  double nanoseconds;
} Cost;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

// Calls a plan's vectorcall function.
Cost repeatPlan(void* (*run)(void*, void*, size_t, void*), void* plan, size_t count) {
  const size_t before = allocations;
  const double begin = now();
  for (size_t i = 0; i < count; ++i) run(plan, NULL, 0, NULL);
  return (Cost){allocations - before, now() - begin};
}

// Calls ncclAllGather.
Cost repeatCall(int (*gather)(const void*, void*, size_t, int, void*, void*), const void* send,
                void* recv, size_t elements, int type, void* communicator, void* stream,
                size_t count) {
  const size_t before = allocations;
  const double begin = now();
  for (size_t i = 0; i < count; ++i) gather(send, recv, elements, type, communicator, stream);
  return (Cost){allocations - before, now() - begin};
}
