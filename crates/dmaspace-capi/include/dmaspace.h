/*
 * dmaspace for C: I/O page tables of every format, and address spaces over memory of this process: over
 * such tables, over iommufd, or over a container of VFIO's type 1.
 * Made by `cargo xtask header`; edit crates/dmaspace-capi/src instead.
 *
 * What holds for every function:
 *
 * - It returns DMASPACE_STATUS_OK, 0, or a negative dmaspace_status; dmaspace_last_error() then has the
 *   sentence with the numbers. "Fails with" lists the codes without DMASPACE_STATUS_.
 * - A function that fails has changed nothing, and filled nothing in, unless it says otherwise.
 * - NULL and misaligned pointers are answered with ARGUMENT, where NULL is not said to be fine.
 * - A handle may be used from any thread, by one at a time. A second one, or a callback that uses the
 *   handle that has called it, gets BUSY. A handle that was destroyed must not be used.
 * - What a function creates the caller owns, and destroys. No pointer is kept, but for memory and a
 *   unit's context, as it says there. Descriptors stay the caller's and may be closed after the call: what
 *   is needed longer is duplicated.
 * - Callbacks return; they do not leave by longjmp or an exception. Nor does this library.
 * - A child of fork() does not use what its parent has made.
 *
 * Addresses and lengths are bytes.
 */

#ifndef DMASPACE_H
#define DMASPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * It cuts mappings without a moment in which the rest is missing.
 */
#define DMASPACE_HITLESS_CUT 1

/**
 * It unmaps any part of what was mapped, also without cutting first.
 */
#define DMASPACE_UNMAP_PART 2

/**
 * It pins and charges memory once, at however many addresses it is.
 */
#define DMASPACE_SHARES_PINS 4

/**
 * It tells which pages devices have written to.
 */
#define DMASPACE_PAGE_DIRTY 8

/**
 * Its tables lie where the caller says, in leaves of the sizes that it wants.
 */
#define DMASPACE_TABLE_PLACEMENT 16

/**
 * Devices may read.
 */
#define DMASPACE_READ 1

/**
 * Devices may write.
 */
#define DMASPACE_WRITE 2

/**
 * Devices may execute, where the format can say it.
 */
#define DMASPACE_EXECUTE 4

/**
 * Only privileged accesses, where the format can say it.
 */
#define DMASPACE_PRIVILEGED 8

/**
 * Accesses are forced to be coherent with the processors' caches, where the format can say it.
 */
#define DMASPACE_COHERENT 16

/**
 * It is a device's registers, no memory.
 */
#define DMASPACE_DEVICE 32

/**
 * It is memory that is not cached.
 */
#define DMASPACE_UNCACHED 64

/**
 * What a function answers. Failures are negative; `dmaspace_last_error` has the sentence.
 */
typedef enum dmaspace_status {
    /**
     * It is done.
     */
    DMASPACE_STATUS_OK = 0,
    /**
     * A pointer is NULL or not aligned, a text is no UTF-8, a flag is not known, or a number is out of
     * its bounds.
     */
    DMASPACE_STATUS_ARGUMENT = -1,
    /**
     * There is no such format, or it has no such table.
     */
    DMASPACE_STATUS_FORMAT = -2,
    /**
     * The memory for tables is used up, or is none for tables of this format.
     */
    DMASPACE_STATUS_TABLE_MEMORY = -3,
    /**
     * The range has no bytes, is no multiple of the smallest page, or lies outside of what is
     * translated or of the memory.
     */
    DMASPACE_STATUS_RANGE = -4,
    /**
     * Something is mapped there.
     */
    DMASPACE_STATUS_OVERLAP = -5,
    /**
     * Nothing is mapped there, or not everywhere.
     */
    DMASPACE_STATUS_NOT_MAPPED = -6,
    /**
     * An end of the range lies inside a leaf or an area, or inside a mapping that the kernel does not
     * cut.
     */
    DMASPACE_STATUS_CUTS = -7,
    /**
     * The format cannot express the permissions.
     */
    DMASPACE_STATUS_PROT = -8,
    /**
     * The limit on locked memory.
     */
    DMASPACE_STATUS_OVER_LIMIT = -9,
    /**
     * The memory cannot be pinned, its physical addresses cannot be found, or it cannot be unpinned.
     */
    DMASPACE_STATUS_PIN = -10,
    /**
     * The unit did not invalidate what was requested: the caller's callback has failed.
     */
    DMASPACE_STATUS_FLUSH = -11,
    /**
     * The device was not attached or detached.
     */
    DMASPACE_STATUS_DEVICE = -12,
    /**
     * The handle is in use, by another thread or by the caller of this callback; or the memory is
     * mapped still, or held by somebody who does not let go.
     */
    DMASPACE_STATUS_BUSY = -13,
    /**
     * The operating system refuses.
     */
    DMASPACE_STATUS_SYSTEM = -14,
    /**
     * A bug of this library. The handle must not be used any more; it is not freed.
     */
    DMASPACE_STATUS_PANIC = -15,
    /**
     * Another failure; the sentence says which.
     */
    DMASPACE_STATUS_OTHER = -16,
    /**
     * Address spaces of this kind cannot do that; the sentence names the kind, and what.
     */
    DMASPACE_STATUS_UNSUPPORTED = -17,
    /**
     * The kernel has as many mappings as it can have.
     */
    DMASPACE_STATUS_TOO_MANY = -18,
} dmaspace_status;

/**
 * What devices have written to in a range of device addresses and nobody has taken care of yet, a bit for
 * each page. It may be used with several address spaces in turn.
 */
typedef struct dmaspace_dirty dmaspace_dirty;

/**
 * An open iommufd. What several of its address spaces map is pinned and charged once.
 *
 * It may be used by many threads at once.
 */
typedef struct dmaspace_iommufd dmaspace_iommufd;

/**
 * Memory of this process that address spaces can map. A page is pinned and charged as long as one of them
 * maps it: once by all that have tables of this library, once by all of one iommufd, and for each mapping
 * by a container of VFIO's type 1.
 */
typedef struct dmaspace_memory dmaspace_memory;

/**
 * Memory behind device addresses that somebody in this process holds, as an emulated device does.
 */
typedef struct dmaspace_pin dmaspace_pin;

/**
 * An address space: over a table of this library and a unit of the caller's (`dmaspace_space_new`), over
 * an iommufd (`dmaspace_space_over_iommufd`), or over a container of VFIO's type 1
 * (`dmaspace_space_over_container`). The functions below work on each; what one cannot do it refuses with
 * UNSUPPORTED.
 */
typedef struct dmaspace_space dmaspace_space;

/**
 * A table of one format in the hardware's own layout. What it maps is the caller's: nothing is pinned
 * or charged, and units are told by the caller's callback.
 */
typedef struct dmaspace_table dmaspace_table;

/**
 * A stretch of one address space, in bytes.
 */
typedef struct dmaspace_span {
    /**
     * The first byte.
     */
    uint64_t start;
    /**
     * The length.
     */
    uint64_t len;
} dmaspace_span;

/**
 * Is told of a stretch of device addresses that was written to. It returns 0 when that is taken care of;
 * anything else ends the call, and the rest stays pending. It must not use the address space or the
 * bitmap.
 */
typedef int (*dmaspace_written)(void *context, struct dmaspace_span range);

/**
 * What a harvest has found.
 */
typedef struct dmaspace_harvested {
    /**
     * Bytes of leaves or pages that were dirty.
     */
    uint64_t bytes;
    /**
     * Some device writes without leaving a trace: all that it may write to counts as written to.
     */
    bool blind;
} dmaspace_harvested;

/**
 * Is told of a range that was not released, or not restored, and why: the code, and the sentence, which is
 * this library's and gone when the callback returns. It must not use the address space.
 */
typedef void (*dmaspace_kept)(void *context,
                              struct dmaspace_span range,
                              enum dmaspace_status why,
                              const char *sentence);

/**
 * Which table is to be built. All zero but for `format` is a good choice.
 */
typedef struct dmaspace_table_config {
    /**
     * The format's name: see `dmaspace_format_name`.
     */
    const char *format;
    /**
     * The size of the largest leaf, in bytes, where the table need not have all that the format has; 0
     * for all.
     */
    uint64_t max_leaf;
    /**
     * The number of levels. 0: 4 for Intel's, AMD's and RISC-V's formats, for the others the fewest for
     * `input_bits`.
     */
    uint8_t levels;
    /**
     * Bits of the addresses that devices use, for Arm's formats (64 - TnSZ) and DART. 0: 48, for DART 32.
     * The other formats have as many as their levels say, and take 0.
     */
    uint8_t input_bits;
    /**
     * For the top of the address space (TTBR1), of Arm's first stage.
     */
    bool upper;
} dmaspace_table_config;

/**
 * The memory of a table's pages. All zero is a good choice: 1 MiB that this library takes.
 *
 * Memory of the caller is a power of two of bytes, at least 16 tables, and aligned to a page of 4 KiB,
 * for units that walk the tables to the format's tables as well. It is cleared, stays the caller's, and
 * must stay mapped, and be written to by nobody else but units, until the table or the address space is
 * destroyed.
 */
typedef struct dmaspace_table_memory {
    /**
     * The first byte; NULL: this library takes the memory, rounded up to a power of two.
     */
    void *start;
    /**
     * Bytes; 0, with `start` NULL: 1 MiB.
     */
    uint64_t bytes;
    /**
     * The address of the first byte as units see it (for hardware: its physical address), a multiple of
     * the size. 0, with `start` NULL: an address above all memory, for who walks the tables in software.
     */
    uint64_t base;
} dmaspace_table_memory;

/**
 * Where a table begins: what a unit is told to walk it, beside the format's name.
 */
typedef struct dmaspace_root {
    /**
     * The address of the top table.
     */
    uint64_t address;
    /**
     * The number of levels.
     */
    uint8_t levels;
} dmaspace_root;

/**
 * What a unit invalidates.
 */
typedef struct dmaspace_invalidation {
    /**
     * The ranges of device addresses. They are this library's, and gone when the callback returns.
     */
    const struct dmaspace_span *ranges;
    /**
     * How many.
     */
    size_t count;
    /**
     * The levels of the leaves that were there: bit n for level n.
     */
    uint32_t leaf_levels;
    /**
     * Tables were unlinked: what the unit has cached of tables must go, too.
     */
    bool tables_unlinked;
    /**
     * Everything of this table, and not only the ranges.
     */
    bool everything;
} dmaspace_invalidation;

/**
 * Has every unit that walks a table invalidate what `what` says, and returns 0 when no access that could
 * have used it is under way any more; anything else says that this has failed. It must not use the
 * handle that is in use.
 */
typedef int (*dmaspace_flush)(void *context, const struct dmaspace_invalidation *what);

/**
 * Who walks an address space's table: the caller's IOMMU, or what stands for it. Its walks must see
 * what processors store. The callbacks return 0, or anything else when they have failed; they are called by
 * the functions of the address space, in their thread, one at a time, and must not use that address
 * space.
 */
typedef struct dmaspace_unit {
    /**
     * Passed to the callbacks. It must be good until the address space is destroyed.
     */
    void *context;
    /**
     * Has `device` translate through the table at `root`.
     */
    int (*attach)(void *context, uint32_t device, const struct dmaspace_root *root);
    /**
     * Has everything fault that `device` does from now on, and returns when no access through the table
     * is under way.
     */
    int (*detach)(void *context, uint32_t device);
    /**
     * Forgets what was unmapped: see `dmaspace_flush`.
     */
    dmaspace_flush flush;
} dmaspace_unit;

/**
 * A stretch that is contiguous in both address spaces, in bytes.
 */
typedef struct dmaspace_run {
    /**
     * The first byte, as devices say it.
     */
    uint64_t iova;
    /**
     * The first byte in physical memory.
     */
    uint64_t pa;
    /**
     * The length.
     */
    uint64_t len;
} dmaspace_run;

/**
 * One leaf of a table.
 */
typedef struct dmaspace_leaf {
    /**
     * Where all of it begins in both address spaces, and its size.
     */
    struct dmaspace_run run;
    /**
     * What devices may do there: DMASPACE_READ and so on.
     */
    uint32_t prot;
    /**
     * The level of its entry, 0 for the smallest page.
     */
    uint8_t level;
} dmaspace_leaf;

/**
 * What an address space is like now.
 */
typedef struct dmaspace_space_info {
    /**
     * What the unit is told to walk. It does not change. All 0 over mappings of the kernel, which shows no
     * tables.
     */
    struct dmaspace_root root;
    /**
     * The sizes of leaves: bit n is set when there are leaves of 2^n bytes; 0 over mappings of the kernel.
     */
    uint64_t page_sizes;
    /**
     * Tables that it consists of; 0 over mappings of the kernel.
     */
    uint64_t tables;
    /**
     * Areas: what was mapped and is not unmapped.
     */
    uint64_t areas;
    /**
     * Areas that are unmapped, but pinned and charged until a flush succeeds.
     */
    uint64_t retired;
    /**
     * Attached devices, or groups.
     */
    uint64_t devices;
    /**
     * What ends of areas must be multiples of, bytes; 1 when nothing is known yet.
     */
    uint64_t granule;
    /**
     * Windows: see `dmaspace_space_get_window`.
     */
    uint64_t windows;
    /**
     * The kernel's mappings; 0 over tables of this library.
     */
    uint64_t mappings;
    /**
     * The most of them that there can be; 0 without a limit.
     */
    uint64_t most_mappings;
    /**
     * Bytes that the kernel has pinned and charged for them.
     */
    uint64_t charged;
    /**
     * What it can do: DMASPACE_HITLESS_CUT and so on.
     */
    uint32_t can;
} dmaspace_space_info;

/**
 * Is told of a run that devices do not reach any more.
 */
typedef void (*dmaspace_released)(void *context, struct dmaspace_run run);

/**
 * What a table is like now.
 */
typedef struct dmaspace_table_info {
    /**
     * What a unit is told to walk it. It does not change.
     */
    struct dmaspace_root root;
    /**
     * The sizes of its leaves: bit n is set when there are leaves of 2^n bytes.
     */
    uint64_t page_sizes;
    /**
     * Tables that it consists of, with those that wait for a flush.
     */
    uint64_t tables;
} dmaspace_table_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Makes a bitmap for `len` bytes of device addresses from `iova` on, with a bit for each `page` bytes, a
 * power of two. Nothing is pending in it.
 *
 * `*dirty` is the caller's, to be destroyed by `dmaspace_dirty_destroy`.
 *
 * Fails with ARGUMENT, RANGE or SYSTEM.
 */
enum dmaspace_status dmaspace_dirty_new(uint64_t iova,
                                        uint64_t len,
                                        uint64_t page,
                                        struct dmaspace_dirty **dirty);

/**
 * Frees the bitmap; what is pending in it is discarded. NULL is fine.
 *
 * Fails with ARGUMENT.
 */
enum dmaspace_status dmaspace_dirty_destroy(struct dmaspace_dirty *dirty);

/**
 * Begins to track what devices write to; what they wrote to before is discarded. Leaves of more than
 * `largest_leaf` bytes are split for it, where `may_interrupt` allows it also with moments in which a
 * translation is missing; 0: leaves stay as they are, and are dirty as a whole.
 *
 * Fails with ARGUMENT, RANGE, BUSY, CUTS, TABLE_MEMORY, FLUSH or SYSTEM, or with UNSUPPORTED for a
 * `largest_leaf` over mappings of the kernel. Nothing is tracked then; leaves may be smaller.
 */
enum dmaspace_status dmaspace_space_track_dirty(const struct dmaspace_space *space,
                                                uint64_t largest_leaf,
                                                bool may_interrupt);

/**
 * Ends that; what was not harvested is discarded.
 *
 * Fails with ARGUMENT or BUSY.
 */
enum dmaspace_status dmaspace_space_untrack_dirty(const struct dmaspace_space *space);

/**
 * Moves what devices have written to in the range of `dirty` into it, has every unit invalidate what it holds
 * of these pages, and tells `each` of all that is pending, in order: what is written from then on is found
 * by the next harvest. `*found` is what this one has found; `found` may be NULL.
 *
 * Fails with ARGUMENT or BUSY; with SYSTEM, OTHER or FLUSH, and what was found is pending still, and told
 * by a later harvest; with OTHER too when `each` has ended it.
 */
enum dmaspace_status dmaspace_space_harvest_dirty(const struct dmaspace_space *space,
                                                  const struct dmaspace_dirty *dirty,
                                                  dmaspace_written each,
                                                  void *context,
                                                  struct dmaspace_harvested *found);

/**
 * How many formats there are.
 */
size_t dmaspace_format_count(void);

/**
 * The name of a format, like "vtd-ss"; NULL when there are not so many. It is this library's, and stays.
 */
const char *dmaspace_format_name(size_t index);

/**
 * An iommufd over `file`, an open `/dev/iommu`; -1: this library opens it. The descriptor stays the
 * caller's and may be closed, which closes nothing while the handle or an address space is there.
 *
 * `*iommufd` is the caller's, to be destroyed by `dmaspace_iommufd_destroy`.
 *
 * Fails with ARGUMENT, or with SYSTEM when there is none, or the file is something else.
 */
enum dmaspace_status dmaspace_iommufd_new(int file, struct dmaspace_iommufd **iommufd);

/**
 * Binds a device to the iommufd: `node` is its own node, like `/dev/vfio/devices/vfio0`, open to read and
 * write. `*device` is its number there. It is bound until the last descriptor of that open node is closed,
 * the caller's or one of an address space that it is attached to. Whoever has bound it by
 * VFIO_DEVICE_BIND_IOMMUFD knows the number, and does not call this.
 *
 * Fails with ARGUMENT, or with SYSTEM when it cannot be bound, or is bound already.
 */
enum dmaspace_status dmaspace_iommufd_bind(const struct dmaspace_iommufd *iommufd,
                                           int node,
                                           uint32_t *device);

/**
 * Frees the handle. Its address spaces go on. NULL is fine.
 *
 * Fails with ARGUMENT.
 */
enum dmaspace_status dmaspace_iommufd_destroy(struct dmaspace_iommufd *iommufd);

/**
 * Makes an empty address space of an iommufd. The kernel pins what is mapped and has tables of its own; a
 * device comes in by `dmaspace_space_attach_file`.
 *
 * What it maps ends at multiples of `granule` bytes of device addresses, rounded up to a power of two of
 * at least 4096: the most that can only be unmapped together. 0: areas that go on in each other may share
 * a mapping however long.
 *
 * Whose locked memory is counted (IOMMU_OPTION_RLIMIT_MODE) is as it was chosen before. `*space` is the
 * caller's, to be destroyed by `dmaspace_space_destroy`.
 *
 * Fails with ARGUMENT or SYSTEM.
 */
enum dmaspace_status dmaspace_space_over_iommufd(const struct dmaspace_iommufd *iommufd,
                                                 uint64_t granule,
                                                 struct dmaspace_space **space);

/**
 * Makes an empty address space over `container`, an open `/dev/vfio/vfio` in which there is no group yet,
 * or an open `/dev/iommu`, which then plays one; -1: this library opens `/dev/vfio/vfio`. The descriptor
 * stays the caller's and may be closed. Groups come in by `dmaspace_space_attach_file`.
 *
 * `granule` is as for `dmaspace_space_over_iommufd`. `*space` is the caller's, to be destroyed by
 * `dmaspace_space_destroy`.
 *
 * Fails with ARGUMENT, or with SYSTEM when there is none, or the file is something else.
 */
enum dmaspace_status dmaspace_space_over_container(int container,
                                                   uint64_t granule,
                                                   struct dmaspace_space **space);

/**
 * Lets a device of the kernel's see the address space. With the first one all areas are mapped and pinned,
 * all or nothing.
 *
 * Over an iommufd `file` is the device's own node, bound to that iommufd, and `device` the number that it
 * has there. Over a container `file` is a group, like `/dev/vfio/17`, and `device` a number of the
 * caller's choice, like 17; the group's devices are opened afterwards (VFIO_GROUP_GET_DEVICE_FD). Where an
 * open `/dev/iommu` plays the container, memory is pinned and windows are known only then: see
 * `dmaspace_space_refresh`.
 *
 * The descriptor stays the caller's and may be closed; the address space has one of its own until the
 * device is detached.
 *
 * Fails with ARGUMENT, BUSY, DEVICE, SYSTEM or, over tables of this library, UNSUPPORTED; or, when an area
 * cannot be mapped for the device, with RANGE or what else `dmaspace_space_map` says.
 */
enum dmaspace_status dmaspace_space_attach_file(const struct dmaspace_space *space,
                                                uint32_t device,
                                                int file);

/**
 * Learns again what can be mapped, which attaching and detaching do by themselves: for an open
 * `/dev/iommu` that plays a container, when a device of a group was opened.
 *
 * Fails with ARGUMENT, BUSY or SYSTEM; what was known stays known.
 */
enum dmaspace_status dmaspace_space_refresh(const struct dmaspace_space *space);

/**
 * Describes `len` bytes of this process from `start` on, both multiples of 4 KiB. Nothing is pinned yet.
 *
 * They stay mapped, readable and writable until the handle is destroyed: the caller unmaps, or maps
 * over, nothing of it before. `fd` is the memory file that is shared there (memfd, hugetlbfs), and `offset` that of
 * `start` in it; -1 for anonymous memory. The descriptor stays the caller's and may be closed.
 *
 * The physical addresses are real only for a process that may see them (CAP_SYS_ADMIN); otherwise they
 * stand in for them, and serve units in software only.
 *
 * `*memory` is the caller's, to be destroyed by `dmaspace_memory_destroy`.
 *
 * Fails with ARGUMENT or SYSTEM.
 */
enum dmaspace_status dmaspace_memory_new(void *start,
                                         uint64_t len,
                                         int fd,
                                         uint64_t offset,
                                         struct dmaspace_memory **memory);

/**
 * Bytes that are charged for it now, by address spaces over tables of this library. What the kernel pins
 * for those over its own mappings, `dmaspace_space_get_info` says of each.
 *
 * Fails with ARGUMENT or BUSY.
 */
enum dmaspace_status dmaspace_memory_charged(const struct dmaspace_memory *memory,
                                             uint64_t *bytes);

/**
 * Frees the handle; the memory is then the caller's alone. NULL is fine.
 *
 * Fails with BUSY while an address space maps it, or has unmapped it and waits for a flush: devices may
 * reach it still. Then, and after ARGUMENT or PANIC, it is still there.
 */
enum dmaspace_status dmaspace_memory_destroy(struct dmaspace_memory *memory);

/**
 * Lets go of `count` ranges, each of which areas cover, as a balloon does: unmapped, flushed, unpinned,
 * exactly that, until they are restored or unmapped. Devices go on reaching all the rest. Their charge is
 * kept, so that they can come back. What devices have written there is discarded. `*unpinned` is how many
 * bytes were unpinned by this library, 0 where the kernel unpins; `unpinned` may be NULL.
 *
 * A range that cannot be cut out without a moment in which the rest is missing is kept, unless
 * `may_interrupt` allows that.
 *
 * Fails as the first range that was not released did: with ARGUMENT, BUSY or SYSTEM, CUTS, NOT_MAPPED, RANGE,
 * OVER_LIMIT or TABLE_MEMORY, and those ranges are as they were; with FLUSH, and they may be pinned twice
 * until `dmaspace_space_flush` succeeds; or with PIN, and they are released, but perhaps pinned. `kept` is
 * told of each of them, if it is not NULL. All others are released, and `*unpinned` is filled in.
 */
enum dmaspace_status dmaspace_space_release(const struct dmaspace_space *space,
                                            const struct dmaspace_span *ranges,
                                            size_t count,
                                            bool may_interrupt,
                                            dmaspace_kept kept,
                                            void *context,
                                            uint64_t *unpinned);

/**
 * Takes back what was released in `count` ranges: pinned and mapped as before. Their ends need not be those
 * that were released; what is not released stays as it is.
 *
 * Fails as the first stretch that stays released did, with ARGUMENT, BUSY, RANGE, PIN, OVER_LIMIT, SYSTEM,
 * TOO_MANY or FLUSH. `kept` is told of each of them, if it is not NULL. All others are back.
 */
enum dmaspace_status dmaspace_space_restore(const struct dmaspace_space *space,
                                            const struct dmaspace_span *ranges,
                                            size_t count,
                                            bool may_interrupt,
                                            dmaspace_kept kept,
                                            void *context);

/**
 * Holds the memory behind a range of device addresses: pinned, and charged once, until
 * `dmaspace_pin_destroy`. `prot` is what is done with it, DMASPACE_READ or DMASPACE_WRITE too; what may be
 * written counts as written at each harvest. With `keeps` it stays pinned when its areas are unmapped;
 * otherwise unmapping them answers BUSY as long as it is held.
 *
 * `*pin` is the caller's, to be destroyed by `dmaspace_pin_destroy`.
 *
 * Fails with ARGUMENT, RANGE, NOT_MAPPED, PROT, OVER_LIMIT, PIN or BUSY.
 */
enum dmaspace_status dmaspace_space_pin(const struct dmaspace_space *space,
                                        uint64_t iova,
                                        uint64_t len,
                                        uint32_t prot,
                                        bool keeps,
                                        struct dmaspace_pin **pin);

/**
 * Lets go of the memory, and frees the handle. NULL is fine.
 *
 * Fails with ARGUMENT.
 */
enum dmaspace_status dmaspace_pin_destroy(struct dmaspace_pin *pin);

/**
 * Makes an empty address space, with a table as `config` says, of a format with tables of 4 KiB other
 * than "armv7-short", and `memory` as for `dmaspace_table_new`. `unit` is who walks it; the structure is
 * copied.
 *
 * `*space` is the caller's, to be destroyed by `dmaspace_space_destroy`.
 *
 * Fails with ARGUMENT, FORMAT or TABLE_MEMORY.
 */
enum dmaspace_status dmaspace_space_new(const struct dmaspace_table_config *config,
                                        const struct dmaspace_table_memory *memory,
                                        const struct dmaspace_unit *unit,
                                        struct dmaspace_space **space);

/**
 * Has the unit let `device` see the address space. For PCI a device is `segment << 16 | bus << 8 |
 * device << 3 | function`. Over mappings of the kernel devices are attached by their files:
 * `dmaspace_space_attach_file`.
 *
 * Fails with ARGUMENT, BUSY, DEVICE or UNSUPPORTED.
 */
enum dmaspace_status dmaspace_space_attach(const struct dmaspace_space *space, uint32_t device);

/**
 * Takes the address space away from `device`. What is mapped stays; the kernel unmaps and unpins it while
 * no device is attached. A group leaves its container only when all its devices are closed.
 *
 * Fails with ARGUMENT, BUSY or DEVICE; after that the device counts as attached.
 */
enum dmaspace_status dmaspace_space_detach(const struct dmaspace_space *space,
                                           uint32_t device);

/**
 * Maps `len` bytes from `offset` on of `memory` at `iova`, all or nothing: what nobody has mapped yet is
 * charged and pinned. `prot` is DMASPACE_READ, DMASPACE_WRITE and so on; the kernel maps for these two
 * only. Before its first device it only notes what is mapped, and pins when that comes.
 *
 * Fails with ARGUMENT, RANGE, OVERLAP, PROT, OVER_LIMIT, PIN, TABLE_MEMORY, TOO_MANY, SYSTEM, FLUSH or BUSY.
 */
enum dmaspace_status dmaspace_space_map(const struct dmaspace_space *space,
                                        uint64_t iova,
                                        const struct dmaspace_memory *memory,
                                        uint64_t offset,
                                        uint64_t len,
                                        uint32_t prot);

/**
 * Unmaps every area in a range, has the unit invalidate them, and then unpins what no other space maps.
 * `*unpinned` is how many bytes that were, 0 where the kernel unpins; `unpinned` may be NULL.
 *
 * Fails with ARGUMENT, RANGE, CUTS, SYSTEM or BUSY, and nothing has changed; with FLUSH, and the areas are
 * unmapped, but their memory is pinned until `dmaspace_space_flush` succeeds; or with PIN.
 */
enum dmaspace_status dmaspace_space_unmap(const struct dmaspace_space *space,
                                          uint64_t iova,
                                          uint64_t len,
                                          uint64_t *unpinned);

/**
 * Has the unit invalidate what was unmapped when a flush failed, and unpins it.
 *
 * Fails with ARGUMENT, FLUSH, PIN or BUSY.
 */
enum dmaspace_status dmaspace_space_flush(const struct dmaspace_space *space);

/**
 * The leaf that maps `iova`.
 *
 * Fails with NOT_MAPPED, ARGUMENT, BUSY or, over mappings of the kernel, UNSUPPORTED.
 */
enum dmaspace_status dmaspace_space_translate(const struct dmaspace_space *space,
                                              uint64_t iova,
                                              struct dmaspace_leaf *found);

/**
 * What the address space is like now.
 *
 * Fails with ARGUMENT or BUSY.
 */
enum dmaspace_status dmaspace_space_get_info(const struct dmaspace_space *space,
                                             struct dmaspace_space_info *info);

/**
 * The window `index`, from 0 on: device addresses that can be mapped, with the devices that are attached
 * now. They are in order; stretches of more than 2^63 bytes come in two.
 *
 * Fails with ARGUMENT, also when there is no such window, or BUSY.
 */
enum dmaspace_status dmaspace_space_get_window(const struct dmaspace_space *space,
                                               size_t index,
                                               struct dmaspace_span *window);

/**
 * Detaches every device, unmaps and unpins everything, and frees the handle. NULL is fine.
 *
 * Fails with ARGUMENT, BUSY or PANIC, and it is still there. After any other failure the handle is gone,
 * but memory that a device may still reach stays pinned for good, and its handle answers BUSY; tables and
 * the memory for them are not freed then, and the caller must not reuse them either.
 */
enum dmaspace_status dmaspace_space_destroy(struct dmaspace_space *space);

/**
 * The sentence about the last failure of a function in this thread, with numbers; empty when there was
 * none. It is this library's, and stays until the next failure in this thread.
 */
const char *dmaspace_last_error(void);

/**
 * The version of this library, like "0.2.0". It is this library's, and stays.
 */
const char *dmaspace_version(void);

/**
 * Builds an empty table.
 *
 * `config` says which; `memory` where, or NULL for 1 MiB that this library takes. Tables of "armv7-short",
 * whose entries have 4 bytes, lie in memory that this library takes.
 *
 * `*table` is the caller's, to be destroyed by `dmaspace_table_destroy`.
 *
 * Fails with ARGUMENT, FORMAT or TABLE_MEMORY.
 */
enum dmaspace_status dmaspace_table_new(const struct dmaspace_table_config *config,
                                        const struct dmaspace_table_memory *memory,
                                        struct dmaspace_table **table);

/**
 * Maps `count` stretches of physical memory from `iova` on, end to end, with the largest leaves that
 * fit: all or nothing. `prot` is DMASPACE_READ, DMASPACE_WRITE and so on.
 *
 * Units that remember what was not present must be told by the caller.
 *
 * Fails with ARGUMENT, RANGE, OVERLAP, PROT, TABLE_MEMORY or BUSY.
 */
enum dmaspace_status dmaspace_table_map(const struct dmaspace_table *table,
                                        uint64_t iova,
                                        const struct dmaspace_span *memory,
                                        size_t count,
                                        uint32_t prot);

/**
 * Unmaps a range, all of which must be mapped, and has the units invalidate it.
 *
 * `flush` is called once, and tells every unit that walks the table. Then `released`, unless it is NULL,
 * is called for each run that was mapped: only now the memory may be used for something else. Both get
 * `context`. `flush` may be NULL if no unit walks the table.
 *
 * Fails with ARGUMENT, RANGE, NOT_MAPPED, CUTS or BUSY, and nothing has changed; or with FLUSH, when
 * `flush` has failed. Then the range is unmapped, but `released` has not been called: that waits for
 * `dmaspace_table_flush`, or the next unmap.
 */
enum dmaspace_status dmaspace_table_unmap(const struct dmaspace_table *table,
                                          uint64_t iova,
                                          uint64_t len,
                                          dmaspace_flush flush,
                                          dmaspace_released released,
                                          void *context);

/**
 * Maps at most `count` pages of `size` bytes, contiguous on both sides, by leaves of at most `size`: as many as lie in
 * one table. `*mapped` says how many are, also beside an error; a driver that is asked for more calls again from there.
 *
 * Units that remember what was not present must be told by the caller.
 *
 * Fails with ARGUMENT, RANGE, OVERLAP, PROT, TABLE_MEMORY or BUSY.
 */
enum dmaspace_status dmaspace_table_map_pages(const struct dmaspace_table *table,
                                              uint64_t iova,
                                              uint64_t pa,
                                              uint64_t size,
                                              uint64_t count,
                                              uint32_t prot,
                                              uint64_t *mapped);

/**
 * Unmaps at most `count` pages of `size` bytes: as many as lie in one table. `*unmapped` says how many are, also beside an
 * error. Their memory may be used for something else once `dmaspace_table_flush` has succeeded; `released` is not called
 * for it.
 *
 * Fails with ARGUMENT, RANGE, NOT_MAPPED, CUTS or BUSY.
 */
enum dmaspace_status dmaspace_table_unmap_pages(const struct dmaspace_table *table,
                                                uint64_t iova,
                                                uint64_t size,
                                                uint64_t count,
                                                uint64_t *unmapped);

/**
 * Has the units invalidate what was unmapped by pages, or when a flush failed, and calls `released` for the latter, as
 * `dmaspace_table_unmap` does. With nothing to invalidate neither is called.
 *
 * Fails with ARGUMENT, BUSY or FLUSH.
 */
enum dmaspace_status dmaspace_table_flush(const struct dmaspace_table *table,
                                          dmaspace_flush flush,
                                          dmaspace_released released,
                                          void *context);

/**
 * The leaf that maps `iova`.
 *
 * Fails with NOT_MAPPED, ARGUMENT or BUSY.
 */
enum dmaspace_status dmaspace_table_translate(const struct dmaspace_table *table,
                                              uint64_t iova,
                                              struct dmaspace_leaf *found);

/**
 * Where the table begins, and what it is like now.
 *
 * Fails with ARGUMENT or BUSY.
 */
enum dmaspace_status dmaspace_table_get_info(const struct dmaspace_table *table,
                                             struct dmaspace_table_info *info);

/**
 * Ends a table with all that is mapped, and frees it. No unit may walk it any more. NULL is fine.
 *
 * Fails with ARGUMENT, BUSY or PANIC, and the table is still there.
 */
enum dmaspace_status dmaspace_table_destroy(struct dmaspace_table *table);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DMASPACE_H */
