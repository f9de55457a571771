/* State of the service: service.c and thread.c. Its lock guards all but what is the thread's own.
 */
#ifndef R2_AGREE_SERVICE_H
#define R2_AGREE_SERVICE_H

#include "agree/internal.h"

/* A frame from this process to itself. */
struct r2_service_note {
    struct r2_list node;
    struct r2_agree_frame frame;
    uint8_t payload[];
};

struct r2_service {
    pthread_mutex_t lock;
    bool listening, opened, running, prepared;
    int listener, wake;
    struct r2_agree_addr addr;
    uint8_t process[16];
    uint8_t (*signed_)[R2_AGREE_TOKEN]; /* tokens of ids that this process has signed */
    size_t nsigned, signed_room;
    struct r2_list all, dirty;
    struct r2_hash by_key;
    /* the thread's own */
    struct r2_agree_net net;
    struct r2_list notes;
};

extern struct r2_service r2_service;

/* Service lock held; once. */
int r2_service_prepare(void);
/* Service lock held: opens the listener once. */
int r2_service_listen(char *why, size_t whylen);

#endif
