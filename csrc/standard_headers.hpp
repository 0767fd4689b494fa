// The standard headers that most files of the lower layers include, compiled once as a precompiled
// header (build_backend/extension.py). No file names it; each includes what it needs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>
