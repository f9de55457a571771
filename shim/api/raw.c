/* The jumps, and NCCL's second names (pncclX), which lead to the same wrappers. */
#include "api/raw.h"

#include "api/call.h"
#include "util/log.h"

static int lacking(void)
{
    return R2_NCCL_USAGE;
}

void *r2_raw_target(const char *name, const void *caller)
{
    bool internal;
    struct r2_real *real = r2_real_for(caller, &internal);
    void *fn = real ? r2_real_symbol(real, name) : NULL;

    if (!fn)
        R2_WARN("%s was called, but %s", name,
                real ? "the NCCL in use does not have it" : "no NCCL is loaded");
    return fn ? fn : (void *)lacking;
}

#if defined(__x86_64__)
/* Integer and vector arguments, the count of the latter (al) and the static chain (r10) survive;
 * the return address is where it was, so the stack's arguments are as well. */
__asm__(".text\n"
        ".globl r2_raw_jump\n"
        ".hidden r2_raw_jump\n"
        ".type r2_raw_jump, @function\n"
        "r2_raw_jump:\n"
        "    .cfi_startproc\n"
        "    sub $200, %rsp\n"
        "    .cfi_adjust_cfa_offset 200\n"
        "    mov %rdi, 0(%rsp)\n"
        "    mov %rsi, 8(%rsp)\n"
        "    mov %rdx, 16(%rsp)\n"
        "    mov %rcx, 24(%rsp)\n"
        "    mov %r8, 32(%rsp)\n"
        "    mov %r9, 40(%rsp)\n"
        "    mov %rax, 48(%rsp)\n"
        "    mov %r10, 56(%rsp)\n"
        "    movups %xmm0, 64(%rsp)\n"
        "    movups %xmm1, 80(%rsp)\n"
        "    movups %xmm2, 96(%rsp)\n"
        "    movups %xmm3, 112(%rsp)\n"
        "    movups %xmm4, 128(%rsp)\n"
        "    movups %xmm5, 144(%rsp)\n"
        "    movups %xmm6, 160(%rsp)\n"
        "    movups %xmm7, 176(%rsp)\n"
        "    mov %r11, %rdi\n"
        "    mov 200(%rsp), %rsi\n"
        "    call r2_raw_target\n"
        "    mov %rax, %r11\n"
        "    mov 0(%rsp), %rdi\n"
        "    mov 8(%rsp), %rsi\n"
        "    mov 16(%rsp), %rdx\n"
        "    mov 24(%rsp), %rcx\n"
        "    mov 32(%rsp), %r8\n"
        "    mov 40(%rsp), %r9\n"
        "    mov 48(%rsp), %rax\n"
        "    mov 56(%rsp), %r10\n"
        "    movups 64(%rsp), %xmm0\n"
        "    movups 80(%rsp), %xmm1\n"
        "    movups 96(%rsp), %xmm2\n"
        "    movups 112(%rsp), %xmm3\n"
        "    movups 128(%rsp), %xmm4\n"
        "    movups 144(%rsp), %xmm5\n"
        "    movups 160(%rsp), %xmm6\n"
        "    movups 176(%rsp), %xmm7\n"
        "    add $200, %rsp\n"
        "    .cfi_adjust_cfa_offset -200\n"
        "    jmp *%r11\n"
        "    .cfi_endproc\n"
        ".size r2_raw_jump, . - r2_raw_jump\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl r2_raw_jump\n"
        ".hidden r2_raw_jump\n"
        ".type r2_raw_jump, @function\n"
        "r2_raw_jump:\n"
        "    stp x29, x30, [sp, #-224]!\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    stp x2, x3, [sp, #32]\n"
        "    stp x4, x5, [sp, #48]\n"
        "    stp x6, x7, [sp, #64]\n"
        "    str x8, [sp, #80]\n"
        "    stp q0, q1, [sp, #96]\n"
        "    stp q2, q3, [sp, #128]\n"
        "    stp q4, q5, [sp, #160]\n"
        "    stp q6, q7, [sp, #192]\n"
        "    mov x0, x16\n"
        "    mov x1, x30\n"
        "    bl r2_raw_target\n"
        "    mov x16, x0\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x2, x3, [sp, #32]\n"
        "    ldp x4, x5, [sp, #48]\n"
        "    ldp x6, x7, [sp, #64]\n"
        "    ldr x8, [sp, #80]\n"
        "    ldp q0, q1, [sp, #96]\n"
        "    ldp q2, q3, [sp, #128]\n"
        "    ldp q4, q5, [sp, #160]\n"
        "    ldp q6, q7, [sp, #192]\n"
        "    ldp x29, x30, [sp], #224\n"
        "    br x16\n"
        ".size r2_raw_jump, . - r2_raw_jump\n");
#endif

#define R2_RAW(name, since) R2_RAW_STUB(name) R2_SECOND(name)
#define R2_PLAIN(name, since, params, args) R2_SECOND(name)
#define R2_COMM(name, since, params, args) R2_SECOND(name)
#define R2_BYPASS(name, since, what, params, args) R2_SECOND(name)
#define R2_COLL(name, since, kind, params, args) R2_SECOND(name)
#define R2_P2P(name, since, kind, params, args) R2_SECOND(name)
#define R2_OWN(name, since, ret, params) R2_SECOND(name)

/* A jump rather than an alias: the wrapper is in another file. */
#define R2_SECOND(name)                                                                            \
    __asm__(".text\n"                                                                              \
            ".globl p" #name "\n"                                                                  \
            ".type p" #name ", @function\n"                                                        \
            "p" #name ":\n" R2_JUMP " " #name R2_PLT "\n"                                          \
            ".size p" #name ", . - p" #name "\n");
#if defined(__x86_64__)
#define R2_JUMP "    endbr64\n    jmp"
#define R2_PLT "@PLT"
#else
#define R2_JUMP "    b"
#define R2_PLT ""
#endif

#include "nccl/nccl.def"
