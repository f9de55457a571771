/* A connection over four NICs of a made-up sysfs tree, over a scripted transport. */
#ifndef R2_TESTS_NEAR_BED_H
#define R2_TESTS_NEAR_BED_H

#include "enginelib/remote.h"

#define NICS 4

static struct remote r;
static struct r2_ep *ep[NICS];

/* Two sockets. NIC 2 is behind the PCIe switch of NIC 0, NIC 3 on the same socket, NIC 1 across. */
static void place_nics(void)
{
    static const char *const paths[NICS] = {
        "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0",
        "/sys/devices/pci0000:80/0000:80:02.0/0000:81:00.0/0000:82:00.0",
        "/sys/devices/pci0000:16/0000:16:02.0/0000:17:01.0/0000:19:00.0",
        "/sys/devices/pci0000:2a/0000:2a:02.0/0000:2b:00.0/0000:2c:00.0",
    };

    for (int i = 0; i < NICS; i++) {
        snprintf(r2_local.nics[i].pci_path, sizeof(r2_local.nics[i].pci_path), "%s", paths[i]);
        r2_local.nics[i].numa = i == 1;
    }
    r2_near_find();
}

static void begin(void)
{
    remote_new(&r, true, NICS);
    CHECK(remote_open(&r, NICS));
    for (int i = 0; i < NICS; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
    }
}

#endif
