/*
 * Memory for a device of the machine, in C: an address space over an iommufd, or over a container of VFIO,
 * and the device by its file. It says what the kernel has pinned, and shows what each interface refuses.
 * With QEMU's edu the device also copies from page to page.
 *
 *   vfio iommufd /dev/vfio/devices/vfio0
 *   vfio type1 /dev/vfio/17 0000:00:05.0
 *   vfio compat /dev/vfio/17 0000:00:05.0      (the same calls, answered by /dev/iommu)
 *
 * The device must be bound to vfio-pci: `dmaspace devices` says how. It is built as map.c is.
 *
 * Sources: Linux, include/uapi/linux/vfio.h; PCI Local Bus Specification 3.0, 6.1 "Configuration Space
 * Organization"; QEMU, docs/specs/edu.
 */
#define _DEFAULT_SOURCE
#include "dmaspace.h"

#include <fcntl.h>
#include <inttypes.h>
#include <linux/vfio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE UINT64_C(4096)
#define SIZE (256 * PAGE)
#define READ_WRITE (DMASPACE_READ | DMASPACE_WRITE)

static void check(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "it does not hold: %s\n", what);
        exit(EXIT_FAILURE);
    }
}

/* Ends the program with the library's sentence unless `status` says that it is done. */
static void done(dmaspace_status status, const char *what)
{
    if (status != DMASPACE_STATUS_OK) {
        fprintf(stderr, "%s: %s (%d)\n", what, dmaspace_last_error(), (int)status);
        exit(EXIT_FAILURE);
    }
}

/* Shows why something was refused, which it must be with this code. */
static void refused(dmaspace_status status, dmaspace_status right, const char *what)
{
    printf("  refused (%d): %s: %s\n", (int)status, what, dmaspace_last_error());
    check(status == right, what);
}

static int opened(const char *path)
{
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    return file;
}

/* Bytes that the kernel counts as locked or pinned by this process. */
static uint64_t counted(void)
{
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    uint64_t sum = 0, kib;

    check(status != NULL, "/proc is there");
    while (fgets(line, sizeof line, status) != NULL) {
        if (sscanf(line, "VmLck: %" SCNu64, &kib) == 1 || sscanf(line, "VmPin: %" SCNu64, &kib) == 1) {
            sum += kib * 1024;
        }
    }
    fclose(status);
    return sum;
}

/* An address space with a device of the machine in it. */
struct opened {
    dmaspace_space *space;
    dmaspace_iommufd *iommufd; /* or NULL: a container */
    uint32_t number;           /* by which the device, or its group, is attached */
    int file;                  /* its own node, or its group */
    int device;
};

/* By the device's own node. */
static struct opened by_iommufd(const char *node)
{
    struct opened this = {0};

    done(dmaspace_iommufd_new(-1, &this.iommufd), "open the iommufd");
    this.file = this.device = opened(node);
    done(dmaspace_iommufd_bind(this.iommufd, this.file, &this.number), "bind the device");
    done(dmaspace_space_over_iommufd(this.iommufd, 0, &this.space), "make an address space");
    done(dmaspace_space_attach_file(this.space, this.number, this.file), "attach the device");
    return this;
}

/* By its group: `container` is -1 for the kernel's own. */
static struct opened by_container(int container, const char *group, const char *address)
{
    struct opened this = {.number = 1};

    done(dmaspace_space_over_container(container, 0, &this.space), "make an address space");
    this.file = opened(group);
    done(dmaspace_space_attach_file(this.space, this.number, this.file), "attach the group");
    this.device = ioctl(this.file, VFIO_GROUP_GET_DEVICE_FD, address);
    check(this.device >= 0, "the device is of the group");
    /* Played by iommufd, a container knows only now what can be mapped. */
    done(dmaspace_space_refresh(this.space), "learn the windows");
    return this;
}

static dmaspace_space_info look(dmaspace_space *space)
{
    dmaspace_space_info info;
    done(dmaspace_space_get_info(space, &info), "look at the address space");
    return info;
}

/* A device address with room for the memory twice, and one at which nothing can be mapped. */
static uint64_t choose(dmaspace_space *space, uint64_t *hole)
{
    dmaspace_span window;

    for (size_t i = 0; dmaspace_space_get_window(space, i, &window) == DMASPACE_STATUS_OK; i++) {
        uint64_t at = (window.start / SIZE + 1) * SIZE, end = window.start + window.len;
        printf("  devices translate %#" PRIx64 " to %#" PRIx64 "\n", window.start, end - 1);
        if (at + 2 * SIZE <= end) {
            *hole = end & ~(PAGE - 1);
            return at;
        }
    }
    check(0, "there is room");
    return 0;
}

/* QEMU's edu: a DMA engine between memory and a buffer of its own. */
struct edu {
    int config;
    uint64_t config_at;
    volatile uint64_t *registers;
};

static struct vfio_region_info region(int device, uint32_t index)
{
    struct vfio_region_info info = {.argsz = sizeof info, .index = index};
    check(ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &info) == 0, "the device has the region");
    return info;
}

/* Lets the device decode its registers and do DMA, or not. */
static void set_command(const struct edu *edu, uint16_t command)
{
    ssize_t size = sizeof command;
    check(pwrite(edu->config, &command, sizeof command, (off_t)edu->config_at + 4) == size,
          "its command register is written");
}

/* False for any other device. */
static int find_edu(int device, struct edu *edu)
{
    uint32_t id = 0;
    ssize_t size = sizeof id;

    edu->config = device;
    edu->config_at = region(device, VFIO_PCI_CONFIG_REGION_INDEX).offset;
    check(pread(device, &id, sizeof id, (off_t)edu->config_at) == size, "its number is read");
    if (id != 0x11e81234) {
        return 0;
    }
    struct vfio_region_info bar = region(device, VFIO_PCI_BAR0_REGION_INDEX);
    void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, device, (off_t)bar.offset);
    check(at != MAP_FAILED, "its registers are mapped");
    edu->registers = at;
    set_command(edu, 1 << 1 | 1 << 2); /* memory space, bus master */
    return 1;
}

/* Moves 1 KiB: `command` 1 fills the buffer from memory, 3 goes the other way. */
static void transfer(const struct edu *edu, uint64_t from, uint64_t to, uint64_t command)
{
    edu->registers[0x80 / 8] = from;
    edu->registers[0x88 / 8] = to;
    edu->registers[0x90 / 8] = 1024;
    edu->registers[0x98 / 8] = command;
    for (int ms = 0; edu->registers[0x98 / 8] & 1; ms++) {
        check(ms < 60000, "the transfer ends");
        usleep(1000);
    }
}

/* Has the device copy from the first page to the second one. */
static void copy(int device, uint64_t iova, volatile unsigned char *pages)
{
    struct edu edu;

    if (!find_edu(device, &edu)) {
        printf("  it is no edu: no DMA\n");
        return;
    }
    for (unsigned i = 0; i < 1024; i++) {
        pages[i] = (unsigned char)(i * 7 + 1);
    }
    transfer(&edu, iova, 0x40000, 1);
    transfer(&edu, 0x40000, iova + PAGE, 3);
    for (unsigned i = 0; i < 1024; i++) {
        check(pages[PAGE + i] == (unsigned char)(i * 7 + 1), "what the device wrote is what it read");
    }
    set_command(&edu, 0);
    munmap((void *)edu.registers, PAGE);
    printf("  the device has copied 1024 bytes\n");
}

static int add_up(void *context, dmaspace_span range)
{
    *(uint64_t *)context += range.len;
    return 0;
}

/* What was written to, as far as the kernel and the device can tell. */
static void dirty(dmaspace_space *space, uint64_t iova)
{
    dmaspace_dirty *bits = NULL;
    dmaspace_harvested found;
    uint64_t written = 0;

    done(dmaspace_dirty_new(iova, SIZE, PAGE, &bits), "make a bitmap");
    refused(dmaspace_space_track_dirty(space, PAGE, false), DMASPACE_STATUS_UNSUPPORTED, "split leaves");
    done(dmaspace_space_track_dirty(space, 0, false), "track");
    done(dmaspace_space_harvest_dirty(space, bits, add_up, &written, &found), "harvest");
    check(!found.blind || written == SIZE, "where it is not known everything counts");
    printf("  written to: %" PRIu64 " bytes%s\n", written, found.blind ? ", as it is not known" : "");
    done(dmaspace_space_untrack_dirty(space), "track no more");
    done(dmaspace_dirty_destroy(bits), "end the bitmap");
}

/* The memory goes for a while, as a balloon wants it. */
static void release(dmaspace_space *space, uint64_t iova, uint64_t before)
{
    dmaspace_span all = {.start = iova, .len = SIZE}, page = {.start = iova + PAGE, .len = PAGE};

    refused(dmaspace_space_release(space, &page, 1, false, NULL, NULL, NULL), DMASPACE_STATUS_CUTS,
            "release a page");
    done(dmaspace_space_release(space, &all, 1, false, NULL, NULL, NULL), "release");
    check(look(space).charged == 0 && counted() == before, "what is released is not pinned");
    done(dmaspace_space_restore(space, &all, 1, false, NULL, NULL), "restore");
    check(look(space).charged == SIZE && counted() == before + SIZE, "what came back is");
    printf("  released and restored\n");
}

static void use(struct opened *this)
{
    dmaspace_space *space = this->space;
    dmaspace_memory *memory = NULL;
    dmaspace_pin *pin = NULL;
    dmaspace_leaf leaf;
    uint64_t hole = 0, iova = choose(space, &hole);
    unsigned char *pages = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    check(pages != MAP_FAILED, "there is memory");
    memset(pages, 0, SIZE);
    done(dmaspace_memory_new(pages, SIZE, -1, 0, &memory), "describe the memory");
    uint64_t before = counted();
    done(dmaspace_space_map(space, iova, memory, 0, SIZE, READ_WRITE), "map");
    dmaspace_space_info info = look(space);
    printf("  pinned: %" PRIu64 " bytes in %" PRIu64 " mapping at %#" PRIx64 ", of which the kernel counts %" PRIu64
           "\n", info.charged, info.mappings, iova, counted() - before);
    check(info.charged == SIZE && counted() == before + SIZE, "what is mapped is pinned and charged");
    copy(this->device, iova, pages);

    refused(dmaspace_space_map(space, iova + PAGE, memory, 0, PAGE, DMASPACE_READ),
            DMASPACE_STATUS_OVERLAP, "map over it");
    refused(dmaspace_space_map(space, hole, memory, 0, PAGE, DMASPACE_READ), DMASPACE_STATUS_RANGE,
            "map where it is reserved");
    refused(dmaspace_space_map(space, iova + SIZE, memory, 0, PAGE, DMASPACE_EXECUTE), DMASPACE_STATUS_PROT,
            "map to execute");
    refused(dmaspace_space_translate(space, iova, &leaf), DMASPACE_STATUS_UNSUPPORTED, "translate");
    refused(dmaspace_space_attach(space, 5), DMASPACE_STATUS_UNSUPPORTED, "attach by number");
    refused(dmaspace_space_attach_file(space, this->number, this->file), DMASPACE_STATUS_DEVICE,
            "attach again");
    refused(dmaspace_space_detach(space, 99), DMASPACE_STATUS_DEVICE, "detach another one");
    refused(dmaspace_memory_destroy(memory), DMASPACE_STATUS_BUSY, "end the memory");
    if (this->iommufd != NULL) {
        refused(dmaspace_iommufd_bind(this->iommufd, this->file, &(uint32_t){0}), DMASPACE_STATUS_SYSTEM,
                "bind again");
    }

    done(dmaspace_space_map(space, iova + SIZE, memory, 0, SIZE, DMASPACE_READ), "map at a second address");
    uint64_t twice = info.can & DMASPACE_SHARES_PINS ? SIZE : 2 * SIZE;
    printf("  mapped twice: %" PRIu64 " bytes are charged\n", look(space).charged);
    check(look(space).charged == twice, "it is charged as the interface says");
    done(dmaspace_space_unmap(space, iova + SIZE, SIZE, NULL), "unmap there");

    dirty(space, iova);
    release(space, iova, before);
    done(dmaspace_space_pin(space, iova, PAGE, DMASPACE_READ, false, &pin), "hold a page");
    refused(dmaspace_space_unmap(space, iova, SIZE, NULL), DMASPACE_STATUS_BUSY, "unmap what is held");
    done(dmaspace_pin_destroy(pin), "let go");
    done(dmaspace_space_unmap(space, iova, SIZE, NULL), "unmap");
    check(look(space).charged == 0 && look(space).mappings == 0, "nothing is pinned any more");
    done(dmaspace_memory_destroy(memory), "end the memory");
    munmap(pages, SIZE);
}

int main(int argc, char **argv)
{
    struct opened this;

    if (argc == 3 && strcmp(argv[1], "iommufd") == 0) {
        this = by_iommufd(argv[2]);
    } else if (argc == 4 && strcmp(argv[1], "type1") == 0) {
        this = by_container(-1, argv[2], argv[3]);
    } else if (argc == 4 && strcmp(argv[1], "compat") == 0) {
        int container = opened("/dev/iommu");
        this = by_container(container, argv[2], argv[3]);
        close(container); /* the address space has one of its own */
    } else {
        fprintf(stderr, "vfio iommufd NODE | vfio type1 GROUP ADDRESS | vfio compat GROUP ADDRESS\n");
        return 2;
    }
    printf("%s\n", argv[1]);
    use(&this);
    if (this.device != this.file) {
        close(this.device); /* a group leaves when its devices are closed */
    }
    done(dmaspace_space_detach(this.space, this.number), "detach");
    check(look(this.space).devices == 0, "no device is left");
    done(dmaspace_space_destroy(this.space), "end the address space");
    done(dmaspace_iommufd_destroy(this.iommufd), "end the iommufd");
    close(this.file);
    printf("everything was given back\n");
    return EXIT_SUCCESS;
}
