#include "base/settings.hpp"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>

#include "base/error.hpp"

namespace fastcoll {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// The variable's value, or "" when unset.
std::string valueOf(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

[[noreturn]] void reject(const std::string& given, const std::string& expected) {
  throw Error(ErrorKind::Value, given, ": expected ", expected, ". Correct or unset it.");
}

}  // namespace

std::string Setting::option() const {
  return lower(std::string(variable).substr(sizeof "FASTCOLL_" - 1));
}

void Setting::parse(const std::string& given, const std::string& text, std::string& value) const {
  if (words.empty()) {
    if (static_cast<std::int64_t>(text.size()) > most) {
      reject(given, concat(most, " characters at most"));
    }
    value = text;
    return;
  }
  const auto same = [&](const std::string& word) { return lower(word) == lower(text); };
  const auto word = std::ranges::find_if(words, same);
  if (word == words.end()) reject(given, "one of " + listOf(words));
  value = *word;
}

void Setting::parse(const std::string& given, const std::string& text, std::int64_t& value) const {
  char* end = nullptr;
  errno = 0;
  const std::int64_t number = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || end == text.c_str() || *end != '\0' || number < least || number > most) {
    reject(given, concat("an integer from ", least, " to ", most));
  }
  value = number;
}

void Setting::parse(const std::string& given, const std::string& text, bool& value) const {
  std::int64_t number = 0;
  parse(given, text, number);
  value = number == 1;
}

Settings Settings::withEnvironment() const {
  Settings all = *this;
  each([&all](const Setting& setting, auto member) {
    const std::string text = valueOf(setting.variable);
    if (text.empty()) return;
    setting.parse(concat("fastcoll: ", setting.variable, "=", text), text, all.*member);
  });
  all.hostId = lower(all.hostId);
  if (const std::string stock = valueOf("TORCH_NCCL_ASYNC_ERROR_HANDLING");
      !stock.empty() && valueOf("FASTCOLL_ERROR_HANDLING").empty()) {
    all.errorHandling = stock == "0" || stock == "2" ? "raise" : "teardown";
  }
  if (valueOf("FASTCOLL_HEARTBEAT_SECONDS").empty()) {
    const int stock = std::atoi(valueOf("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC").c_str());
    if (stock > 0) all.heartbeatSeconds = stock;
    if (valueOf("TORCH_NCCL_ENABLE_MONITORING") == "0") all.heartbeatSeconds = 0;
  }
  return all;
}

SharedMemoryChoice Settings::sharedMemoryChoice() const {
  if (sharedMemory == "require") return SharedMemoryChoice::Require;
  return sharedMemory == "off" ? SharedMemoryChoice::Off : SharedMemoryChoice::Auto;
}

StoresChoice Settings::storesChoice() const {
  if (stores == "plain") return StoresChoice::Plain;
  return stores == "streaming" ? StoresChoice::Streaming : StoresChoice::Auto;
}

DigestsOf Settings::digestsOf() const {
  if (digest == "all") return DigestsOf::All;
  return digest == "sum" ? DigestsOf::Sums : DigestsOf::Nothing;
}

}  // namespace fastcoll
