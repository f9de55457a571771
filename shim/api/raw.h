/* Functions of NCCL that are passed on without a prototype, in the library with NCCL's name: a jump
 * to the real one with every register and the stack as the caller left them. `r2ccl-ctl shim build`
 * writes a file of such rows for the functions that a newer NCCL has. */
#ifndef R2_API_RAW_H
#define R2_API_RAW_H

/* The real function, or one that returns an error. Called by the code below. */
void *r2_raw_target(const char *name, const void *caller);

#if defined(__x86_64__)
#define R2_RAW_STUB(name)                                                                          \
    __asm__(".section .rodata\n"                                                                   \
            "r2_raw_name_" #name ": .asciz \"" #name "\"\n"                                        \
            ".text\n"                                                                              \
            ".globl " #name "\n"                                                                   \
            ".type " #name ", @function\n" #name ":\n"                                             \
            "    endbr64\n"                                                                        \
            "    lea r2_raw_name_" #name "(%rip), %r11\n"                                          \
            "    jmp r2_raw_jump\n"                                                                \
            ".size " #name ", . - " #name "\n");
#elif defined(__aarch64__)
#define R2_RAW_STUB(name)                                                                          \
    __asm__(".section .rodata\n"                                                                   \
            "r2_raw_name_" #name ": .asciz \"" #name "\"\n"                                        \
            ".text\n"                                                                              \
            ".globl " #name "\n"                                                                   \
            ".type " #name ", @function\n" #name ":\n"                                             \
            "    adrp x16, r2_raw_name_" #name "\n"                                                \
            "    add x16, x16, :lo12:r2_raw_name_" #name "\n"                                      \
            "    b r2_raw_jump\n"                                                                  \
            ".size " #name ", . - " #name "\n");
#endif

#endif
