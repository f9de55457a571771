/* What the library with NCCL's name does not have: the functions of the real NCCL that it does not
 * pass on, found by comparing the two tables of dynamic symbols. */
#define _GNU_SOURCE
#include "real/real.h"

#ifdef R2_NAMED_NCCL
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/log.h"

struct image {
    const unsigned char *data;
    size_t size;
};

/* `n` entries of `each` bytes at `offset`, if they lie in the file. */
static const void *part(const struct image *image, uint64_t offset, uint64_t n, uint64_t each)
{
    if (offset > image->size || (each && n > (image->size - offset) / each))
        return NULL;
    return image->data + offset;
}

static const ElfW(Shdr) * find_section(const struct image *image, unsigned type)
{
    const ElfW(Ehdr) *head = part(image, 0, 1, sizeof(*head));
    const ElfW(Shdr) * list;

    if (!head || memcmp(head->e_ident, ELFMAG, SELFMAG))
        return NULL;
    list = part(image, head->e_shoff, head->e_shnum, sizeof(*list));
    for (int i = 0; list && i < head->e_shnum; i++)
        if (list[i].sh_type == type)
            return &list[i];
    return NULL;
}

/* Appends to `out` the names of NCCL's functions that this library lacks; how many. */
static int compare(const struct image *image, char *out, size_t size)
{
    const ElfW(Ehdr) *head = part(image, 0, 1, sizeof(*head));
    const ElfW(Shdr) *table = find_section(image, SHT_DYNSYM);
    const ElfW(Shdr) *texts =
        table ? part(image, head->e_shoff + (uint64_t)table->sh_link * sizeof(*texts), 1,
                     sizeof(*texts))
              : NULL;
    const ElfW(Sym) *symbols =
        table ? part(image, table->sh_offset, table->sh_size / sizeof(*symbols), sizeof(*symbols))
              : NULL;
    const char *names = texts ? part(image, texts->sh_offset, texts->sh_size, 1) : NULL;
    size_t count = table ? table->sh_size / sizeof(*symbols) : 0;
    int found = 0;

    if (!symbols || !names || !texts->sh_size || names[texts->sh_size - 1])
        return 0;
    for (size_t i = 0; i < count; i++) {
        const char *name;

        if (symbols[i].st_shndx == SHN_UNDEF || (symbols[i].st_info & 0xf) != STT_FUNC ||
            symbols[i].st_name >= texts->sh_size)
            continue;
        name = names + symbols[i].st_name;
        if (strncmp(name, "nccl", 4) || r2_real_own_symbol(name))
            continue;
        found++;
        if (strlen(out) + strlen(name) + 3 < size)
            strcat(strcat(out, *out ? ", " : ""), name);
    }
    return found;
}

void r2_real_tell_lacking(struct r2_real *real)
{
    char names[2048] = "";
    struct image image = {0};
    struct stat st;
    int fd = open(real->path, O_RDONLY | O_CLOEXEC), count;

    if (fd < 0 || fstat(fd, &st)) {
        if (fd >= 0)
            close(fd);
        return;
    }
    image.size = (size_t)st.st_size;
    image.data = mmap(NULL, image.size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (image.data == MAP_FAILED)
        return;
    count = compare(&image, names, sizeof(names));
    munmap((void *)(uintptr_t)image.data, image.size);
    if (count)
        R2_WARN("NCCL %d.%d.%d at %s has %d functions that %s does not pass on: %s. Programs that "
                "need them do not start; `r2ccl-ctl shim build --nccl %s` makes one that has them",
                real->version / 10000, real->version / 100 % 100, real->version % 100, real->path,
                count, r2_real_own_path(), names, real->path);
}
#else
void r2_real_tell_lacking(struct r2_real *real)
{
    (void)real; /* what has no wrapper goes past the shim by itself */
}
#endif
