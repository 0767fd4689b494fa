#pragma once

#include <string>
#include <vector>

namespace recording {

/// Registers symmetric memory for the device in torch.
void addSymmetricMemory();
/// With true, every rendezvous and free waits until the call with false.
void holdRendezvous(bool hold);
/// Values of the environment switches in the last rendezvous.
std::vector<std::string> switchesSeen();
/// Most rendezvous that ran at the same time.
int mostAtOnce();

}  // namespace recording
