/* A CUDA driver that runs nothing: it records what kernels are launched with. */
#include <stdio.h>
#include <string.h>

struct Config {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned attribute_count;
};

static char log_text[1 << 16];
static int widths[64], width_count; /* bytes of each parameter of the next launches */
static const char* failing = "";
static int failing_status, max_threads = 1024;
static __thread void* context;

const char* fake_cuda_log(void) { return log_text; }
void fake_cuda_reset(const int* bytes, int count) {
  log_text[0] = 0;
  failing = "";
  max_threads = 1024;
  width_count = count;
  memcpy(widths, bytes, count * sizeof(int));
}
void fake_cuda_fail(const char* function, int status) {
  failing = strdup(function);
  failing_status = status;
}
void fake_cuda_threads(int most) { max_threads = most; }

static int done(const char* function) { return strcmp(function, failing) ? 0 : failing_status; }

static int launched(void* function, const struct Config* with, void** parameters) {
  char* at = log_text + strlen(log_text);
  at += sprintf(at, "%s grid %u %u %u block %u %u %u shared %u stream %p attributes %u context %p parameters",
                (const char*)function, with->grid[0], with->grid[1], with->grid[2], with->block[0],
                with->block[1], with->block[2], with->shared, with->stream, with->attribute_count,
                context);
  for (int i = 0; i < width_count; ++i) {
    *at++ = ' ';
    for (int byte = 0; byte < widths[i]; ++byte) {
      at += sprintf(at, "%02x", ((unsigned char*)parameters[i])[byte]);
    }
  }
  strcpy(at, "\n");
  return done("cuLaunchKernel");
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  struct Config with = {{x, y, z}, {bx, by, bz}, shared, stream, 0, 0};
  return launched(function, &with, parameters);
}
int cuLaunchKernelEx(const struct Config* with, void* function, void** parameters, void** extra) {
  return launched(function, with, parameters);
}
int cuCtxGetCurrent(void** current) { return *current = context, done("cuCtxGetCurrent"); }
int cuCtxSetCurrent(void* next) { return context = next, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void** made, int device) { return *made = (void*)(100L + device), 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { return *value = 1 << 16, 0; }
int cuModuleLoadData(void** module, const void* image) {
  *module = (void*)image;
  return memcmp(image, "\177ELF", 4) ? 200 : done("cuModuleLoadData");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = strdup(name);
  return done("cuModuleGetFunction");
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return *value = attribute ? 0 : max_threads, 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  char* at = log_text + strlen(log_text);
  sprintf(at, "%s attribute %d is %d\n", (const char*)function, attribute, value);
  return 0;
}
int cuFuncSetCacheConfig(void* function, int config) { return 0; }
int cuGetErrorName(int status, const char** text) { return *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int status, const char** text) { return *text = "a fake error", 0; }
/* Triton's module needs these to load. */
int cuCtxGetLimit(void) { return 1; }
int cuCtxSetLimit(void) { return 1; }
int cuDriverGetVersion(void) { return 1; }
int cuPointerGetAttribute(void) { return 1; }
int cuOccupancyMaxActiveClusters(void) { return 1; }
