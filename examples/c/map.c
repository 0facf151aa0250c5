/*
 * Memory for devices, in C: a table of each format, and an address space whose memory is pinned and
 * charged. The IOMMU is played by callbacks, which say what they are told.
 *
 * Build it with the library of `cargo build --release --package dmaspace-capi`:
 *
 *   gcc -std=c11 -I crates/dmaspace-capi/include examples/c/map.c \
 *       -L target/release -ldmaspace_capi -Wl,-rpath,$PWD/target/release -o map
 */
#include "dmaspace.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define PAGES 8
#define IOVA UINT64_C(0x100000000)
#define READ_WRITE (DMASPACE_READ | DMASPACE_WRITE)

/* Ends the program with the library's sentence unless `status` says that it is done. */
static void done(dmaspace_status status, const char *what)
{
    if (status == DMASPACE_STATUS_OK) {
        return;
    }
    fprintf(stderr, "%s: %s (%d)\n", what, dmaspace_last_error(), (int)status);
    exit(EXIT_FAILURE);
}

static void check(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "it does not hold: %s\n", what);
        exit(EXIT_FAILURE);
    }
}

/* An IOMMU that only counts. */
struct iommu {
    uint64_t invalidated_bytes;
    uint64_t released_bytes;
    unsigned devices;
};

static int iommu_attach(void *context, uint32_t device, const dmaspace_root *root)
{
    struct iommu *iommu = context;
    printf("  device %#x translates through the %u levels at %#" PRIx64 "\n", device,
           (unsigned)root->levels, root->address);
    iommu->devices += 1;
    return 0;
}

static int iommu_detach(void *context, uint32_t device)
{
    struct iommu *iommu = context;
    (void)device;
    iommu->devices -= 1;
    return 0;
}

/* Here a real one would invalidate its IOTLB, and wait until that is done. */
static int iommu_flush(void *context, const dmaspace_invalidation *what)
{
    struct iommu *iommu = context;
    for (size_t i = 0; i < what->count; i++) {
        iommu->invalidated_bytes += what->ranges[i].len;
    }
    return 0;
}

/* From here on the memory can be used for something else. */
static void released(void *context, dmaspace_run run)
{
    struct iommu *iommu = context;
    iommu->released_bytes += run.len;
}

/* Maps two runs in a table of the format, translates, and unmaps them. */
static void table_of(const char *format)
{
    struct iommu iommu = {0};
    dmaspace_table_config config = {.format = format};
    dmaspace_table *table = NULL;
    dmaspace_table_info info;
    dmaspace_leaf leaf;

    done(dmaspace_table_new(&config, NULL, &table), format);
    done(dmaspace_table_get_info(table, &info), "look at the table");
    uint64_t page = info.page_sizes & (~info.page_sizes + 1); /* the smallest */
    uint64_t iova = 64 * page;
    dmaspace_span memory[] = {{.start = 16 * page, .len = 3 * page}, {.start = 4 * page, .len = page}};
    done(dmaspace_table_map(table, iova, memory, 2, READ_WRITE), "map");
    done(dmaspace_table_translate(table, iova + 3 * page, &leaf), "translate");
    check(leaf.run.pa == 4 * page, "the fourth page lies where the second run begins");
    printf("  %-16s %u levels, pages from %3" PRIu64 " KiB, %#" PRIx64 " is at %#" PRIx64 "\n", format,
           (unsigned)info.root.levels, page / 1024, iova + 3 * page, leaf.run.pa);
    check(dmaspace_table_map(table, iova, memory, 1, READ_WRITE) == DMASPACE_STATUS_OVERLAP,
          "nothing is mapped over");
    done(dmaspace_table_unmap(table, iova, 4 * page, iommu_flush, released, &iommu), "unmap");
    check(iommu.invalidated_bytes == 4 * page && iommu.released_bytes == 4 * page,
          "all of it was flushed and released");
    done(dmaspace_table_destroy(table), "end the table");
}

/* Maps memory of this process, pinned and charged, for a device. */
static void address_space(void)
{
    struct iommu iommu = {0};
    dmaspace_unit unit = {
        .context = &iommu, .attach = iommu_attach, .detach = iommu_detach, .flush = iommu_flush};
    dmaspace_table_config config = {.format = "vtd-ss"};
    dmaspace_space *space = NULL;
    dmaspace_memory *memory = NULL;
    dmaspace_leaf leaf;
    uint64_t charged = 0, unpinned = 0;
    void *pages = aligned_alloc(4096, PAGES * 4096);

    check(pages != NULL, "there is memory");
    done(dmaspace_space_new(&config, NULL, &unit, &space), "make an address space");
    done(dmaspace_memory_new(pages, PAGES * 4096, -1, 0, &memory), "describe the memory");
    done(dmaspace_space_attach(space, 0x28), "attach"); /* 00:05.0 */
    done(dmaspace_space_map(space, IOVA, memory, 0, PAGES * 4096, READ_WRITE), "map");
    done(dmaspace_memory_charged(memory, &charged), "ask for the charge");
    done(dmaspace_space_translate(space, IOVA, &leaf), "translate");
    printf("  %" PRIu64 " bytes are pinned and charged, a leaf of %" PRIu64 " first\n", charged,
           leaf.run.len);
    check(charged >= PAGES * 4096, "what is mapped is charged");
    check(dmaspace_memory_destroy(memory) == DMASPACE_STATUS_BUSY, "what is mapped stays");
    printf("  refused: %s\n", dmaspace_last_error());
    done(dmaspace_space_unmap(space, IOVA, PAGES * 4096, &unpinned), "unmap");
    check(iommu.invalidated_bytes == PAGES * 4096 && unpinned == PAGES * 4096,
          "all of it was flushed, and then unpinned");
    done(dmaspace_space_detach(space, 0x28), "detach");
    check(iommu.devices == 0, "no device is left");
    done(dmaspace_space_destroy(space), "end the address space");
    done(dmaspace_memory_destroy(memory), "end the memory");
    free(pages);
}

int main(void)
{
    printf("dmaspace %s\ntables\n", dmaspace_version());
    for (size_t i = 0; i < dmaspace_format_count(); i++) {
        table_of(dmaspace_format_name(i));
    }
    printf("address space\n");
    address_space();
    printf("everything was given back\n");
    return EXIT_SUCCESS;
}
