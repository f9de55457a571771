/* dlsym, so that programs that open NCCL themselves get the wrappers (opt-in: R2CCL_DLSYM=1).
 *
 * Every other look-up must not notice: RTLD_NEXT and RTLD_DEFAULT go by the return address, so the
 * real dlsym is jumped to, with all registers and the stack as they were. Names that do not begin
 * with "nccl" take that way after four compares. The others pass by r2_dlsym_wrapper first. That
 * returns a wrapper only if four things hold:
 *   - R2CCL_DLSYM is on;
 *   - the handle is one of dlopen (not RTLD_NEXT or RTLD_DEFAULT), and finds the name;
 *   - what it finds lies in the NCCL that the wrappers call (real/real.h);
 *   - it is a function that has a wrapper.
 * A second NCCL of the process is left alone: it runs without the shim.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#include "api/call.h"
#include "settings/settings.h"
#include "util/log.h"

/* Called by the code below. */
void *r2_dlsym_wrapper(void *handle, const char *name);
void *r2_dlsym_real(void);

static __thread int inside __attribute__((tls_model("initial-exec")));

R2_UNSANITIZED void *r2_dlsym_real(void)
{
    return (void *)r2_real_dlsym_address();
}

void *r2_dlsym_wrapper(void *handle, const char *name)
{
    void *found, *wrapper = NULL;
    int id;

    /* The shim's own look-ups, and those of libraries that it opens. */
    if (inside || handle == RTLD_NEXT || handle == RTLD_DEFAULT || !r2_settings_get()->dlsym)
        return NULL;
    inside++;
    id = r2_api_find(name);
    found = id >= 0 ? r2_real_dlsym(handle, name) : NULL;
    if (found && r2_shim_on() && r2_real_at(found))
        wrapper = r2_api_wrapper((enum r2_api)id);
    inside--;
    return wrapper;
}

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    test %rsi, %rsi\n"
        "    je 1f\n"
        "    cmpb $'n', (%rsi)\n"
        "    jne 1f\n"
        "    cmpb $'c', 1(%rsi)\n"
        "    jne 1f\n"
        "    cmpb $'c', 2(%rsi)\n"
        "    jne 1f\n"
        "    cmpb $'l', 3(%rsi)\n"
        "    jne 1f\n"
        "    push %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    push %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    sub $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call r2_dlsym_wrapper\n"
        "    add $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    pop %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    pop %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    test %rax, %rax\n"
        "    je 1f\n"
        "    ret\n"
        "1:  push %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    push %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    sub $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    call r2_dlsym_real\n"
        "    add $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    pop %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    pop %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    jmp *%rax\n"
        "    .cfi_endproc\n"
        ".size dlsym, . - dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    stp x29, x30, [sp, #-48]!\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    cbz x1, 1f\n"
        "    ldrb w9, [x1]\n"
        "    cmp w9, #'n'\n"
        "    b.ne 1f\n"
        "    ldrb w9, [x1, #1]\n"
        "    cmp w9, #'c'\n"
        "    b.ne 1f\n"
        "    ldrb w9, [x1, #2]\n"
        "    cmp w9, #'c'\n"
        "    b.ne 1f\n"
        "    ldrb w9, [x1, #3]\n"
        "    cmp w9, #'l'\n"
        "    b.ne 1f\n"
        "    bl r2_dlsym_wrapper\n"
        "    cbz x0, 1f\n"
        "    ldp x29, x30, [sp], #48\n"
        "    ret\n"
        "1:  bl r2_dlsym_real\n"
        "    mov x16, x0\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x29, x30, [sp], #48\n"
        "    br x16\n"
        ".size dlsym, . - dlsym\n");
#endif
