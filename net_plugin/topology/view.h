/* What r2ccl-ctl asks the plugin about NICs. */
#ifndef R2_TOPOLOGY_VIEW_H
#define R2_TOPOLOGY_VIEW_H

/* The NICs that a job with this environment would use, and why it would not use each other
 * interface: an object with error (text, "" for none), nics and others. The caller frees it; NULL:
 * no memory. */
__attribute__((visibility("default"))) char *r2ccl_nics_json(void);

/* r2_nics_order for `n` NICs of which only this is known: path below /sys/devices ("" for none),
 * NUMA node (-1: not known), weight. 0 or -errno. */
__attribute__((visibility("default"))) int r2ccl_nics_order(int n, const char *const *pci_paths,
                                                            const int *numa, const int *weights,
                                                            int home, int *order);

#endif
