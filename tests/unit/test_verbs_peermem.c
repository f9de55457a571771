/* Memory of a device that is registered by its address, as a peer memory module lets it: what
 * test_verbs_device.c tests of DMA buffers (rung 3). The stand-in is told which addresses the
 * module knows. */
#define PEER_MEMORY
#include "test_verbs_device.c"
