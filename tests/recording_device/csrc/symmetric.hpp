#pragma once

#include <string>
#include <vector>

namespace recording {

/// Gives torch symmetric memory for the device.
void addSymmetricMemory();
/// Has every rendezvous and free wait until it is called with false.
void holdRendezvous(bool hold);
/// Values of the environment's switches in the last rendezvous.
std::vector<std::string> switchesSeen();
/// Calls of rendezvous that were under way together, at most.
int mostAtOnce();

}  // namespace recording
