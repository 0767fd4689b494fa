// Injected faults, the record of all calls, and the text of the last error.
//
// A fault is a line "kind name number after times" for fakeNcclInject. It skips the first `after`
// calls of that name (* is any call that moves data) and then occurs `times` times.
//   fail name status         the call returns this status and does nothing else
//   hang name 0              the call waits until its communicator is aborted
//   in_progress name polls   the call is done; it and so many polls return ncclInProgress
//   skip name 0              the call is not made, and succeeds
//   async_error name status  the call is done; the communicator gets this asynchronous error
// FAKE_NCCL_LOG names a file to which every call is appended.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_nccl.h"

enum { MAX_FAULTS = 32, MAX_CALLS = 1 << 14, TEXT = 160 };

typedef struct {
  char kind[16], name[32];
  int number, after, times;
} Injected;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Injected faults[MAX_FAULTS];
static int fault_count, call_count, log_file = -1;
static char last_error[256];
static char (*calls)[TEXT];

/// Adds a fault. Returns 0, or -1 if the text is invalid.
EXPORT int fakeNcclInject(const char* text) {
  static const char* const kinds[] = {"fail", "hang", "in_progress", "skip", "async_error"};
  Injected injected;
  if (sscanf(text, "%15s %31s %d %d %d", injected.kind, injected.name, &injected.number,
             &injected.after, &injected.times) != 5) {
    return -1;
  }
  bool known = false;
  for (int i = 0; i < 5; ++i) known = known || !strcmp(kinds[i], injected.kind);
  pthread_mutex_lock(&lock);
  known = known && fault_count < MAX_FAULTS;
  if (known) faults[fault_count++] = injected;
  pthread_mutex_unlock(&lock);
  return known ? 0 : -1;
}

/// Also ends calls that hang.
EXPORT void fakeNcclClearFaults(void) {
  release();
  pthread_mutex_lock(&lock);
  fault_count = 0;
  pthread_mutex_unlock(&lock);
}

EXPORT int fakeNcclCallCount(void) {
  pthread_mutex_lock(&lock);
  const int count = call_count;
  pthread_mutex_unlock(&lock);
  return count;
}

/// The text of a call: its name, then its arguments. Valid until fakeNcclClearCalls.
EXPORT const char* fakeNcclCall(int index) {
  return index < 0 || index >= fakeNcclCallCount() ? NULL : calls[index];
}

EXPORT void fakeNcclClearCalls(void) {
  pthread_mutex_lock(&lock);
  call_count = 0;
  pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void read_environment(void) {
  calls = calloc(MAX_CALLS, TEXT);
  if (!calls) abort();
  const char* path = getenv("FAKE_NCCL_LOG");
  if (path && (log_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0) {
    fprintf(stderr, "FAKE_NCCL_LOG=%s cannot be written\n", path);
    abort();
  }
}

static _Thread_local int struck_async;

/// Returns the fault for this call.
Fault fault(const char* name) {
  Fault found = {OK, false, false, 0};
  struck_async = 0;
  bool moves = false;
  for (int kind = 0; kind < KINDS; ++kind) moves = moves || !strcmp(kind_names[kind], name);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < fault_count; ++i) {
    Injected* one = &faults[i];
    if ((strcmp(one->name, name) && !(moves && !strcmp(one->name, "*"))) || one->after-- > 0 ||
        one->times <= 0)
      continue;
    --one->times;
    if (!strcmp(one->kind, "fail")) found.status = (Status)one->number;
    if (!strcmp(one->kind, "hang")) found.hang = true;
    if (!strcmp(one->kind, "skip")) found.skip = true;
    if (!strcmp(one->kind, "in_progress")) found.polls = one->number;
    if (!strcmp(one->kind, "async_error")) struck_async = one->number;
  }
  pthread_mutex_unlock(&lock);
  if (found.status != OK) error(found.status, "injected into %s", name);
  return found;
}

/// Sets the communicator's asynchronous error, if the call's fault has one.
void count_call(Comm* comm) {
  if (struck_async) {
    error((Status)struck_async, "injected asynchronous error");
    atomic_store(&comm->async_error, struck_async);
  }
  struck_async = 0;
}

Status error(Status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  pthread_mutex_unlock(&lock);
  va_end(arguments);
  return status;
}

EXPORT const char* ncclGetLastError(Comm* comm) {
  (void)comm;
  return last_error;
}

void record(const char* name, const Comm* comm, const void* stream, uint64_t count, int type,
            int op, int root) {
  pthread_mutex_lock(&lock);
  char* text = calls[call_count % MAX_CALLS];
  const int length =
      snprintf(text, TEXT, "%s comm=%d stream=%#lx count=%lu type=%d op=%d root=%d\n", name,
               comm ? comm->number : -1, (unsigned long)(uintptr_t)stream, (unsigned long)count,
               type, op, root);
  if (log_file >= 0 && write(log_file, text, (size_t)length) != length) abort();
  text[length - 1] = 0;
  if (call_count < MAX_CALLS - 1) ++call_count;
  pthread_mutex_unlock(&lock);
}
