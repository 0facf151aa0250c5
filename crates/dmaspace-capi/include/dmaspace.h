/*
 * dmaspace for C: I/O page tables of every format, and address spaces over memory of this process.
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
 *   unit's context, as it says there.
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
     * An end of the range lies inside a leaf or an area.
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
     * The unit has not forgotten what it was told to: the caller's callback has failed.
     */
    DMASPACE_STATUS_FLUSH = -11,
    /**
     * The device was not attached or detached.
     */
    DMASPACE_STATUS_DEVICE = -12,
    /**
     * The handle is in use, by another thread or by the caller of this callback; or the memory is
     * mapped still.
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
} dmaspace_status;

/**
 * Memory of this process that address spaces can map. A page is pinned and charged once, however many
 * of them map it, and as long as one does.
 */
typedef struct dmaspace_memory dmaspace_memory;

/**
 * An address space over a table of ours and a unit of the caller's.
 */
typedef struct dmaspace_space dmaspace_space;

/**
 * A table of one format in the hardware's own layout. What it maps is the caller's: nothing is pinned
 * or charged, and units are told by the caller's callback.
 */
typedef struct dmaspace_table dmaspace_table;

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
 * What a unit is to forget.
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
 * Has every unit that walks a table forget what `what` says, and returns 0 when no access that could
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
     * What the unit is told to walk. It does not change.
     */
    struct dmaspace_root root;
    /**
     * The sizes of leaves: bit n is set when there are leaves of 2^n bytes.
     */
    uint64_t page_sizes;
    /**
     * Tables that it consists of.
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
     * Attached devices.
     */
    uint64_t devices;
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
 * How many formats there are.
 */
size_t dmaspace_format_count(void);

/**
 * The name of a format, like "vtd-ss"; NULL when there are not so many. It is this library's, and stays.
 */
const char *dmaspace_format_name(size_t index);

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
 * Bytes that are charged for it now.
 *
 * Fails with ARGUMENT or BUSY.
 */
enum dmaspace_status dmaspace_memory_charged(const struct dmaspace_memory *memory, uint64_t *bytes);

/**
 * Frees the handle; the memory is then the caller's alone. NULL is fine.
 *
 * Fails with BUSY while an address space maps it, or has unmapped it and waits for a flush: devices may
 * reach it still. Then, and after ARGUMENT or PANIC, it is still there.
 */
enum dmaspace_status dmaspace_memory_destroy(struct dmaspace_memory *memory);

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
 * device << 3 | function`.
 *
 * Fails with ARGUMENT, BUSY or DEVICE.
 */
enum dmaspace_status dmaspace_space_attach(const struct dmaspace_space *space, uint32_t device);

/**
 * Has the unit take the address space away from `device`. What is mapped stays.
 *
 * Fails with ARGUMENT, BUSY or DEVICE; after that the device counts as attached.
 */
enum dmaspace_status dmaspace_space_detach(const struct dmaspace_space *space, uint32_t device);

/**
 * Maps `len` bytes from `offset` on of `memory` at `iova`, all or nothing: what nobody has mapped yet is
 * charged and pinned. `prot` is DMASPACE_READ, DMASPACE_WRITE and so on.
 *
 * Fails with ARGUMENT, RANGE, OVERLAP, PROT, OVER_LIMIT, PIN, TABLE_MEMORY, FLUSH or BUSY.
 */
enum dmaspace_status dmaspace_space_map(const struct dmaspace_space *space,
                                        uint64_t iova,
                                        const struct dmaspace_memory *memory,
                                        uint64_t offset,
                                        uint64_t len,
                                        uint32_t prot);

/**
 * Unmaps every area in a range, has the unit forget them, and then unpins what nobody else maps.
 * `*unpinned` is how many bytes that were; `unpinned` may be NULL.
 *
 * Fails with ARGUMENT, RANGE, CUTS or BUSY, and nothing has changed; with FLUSH, and the areas are
 * unmapped, but their memory is pinned until `dmaspace_space_flush` succeeds; or with PIN.
 */
enum dmaspace_status dmaspace_space_unmap(const struct dmaspace_space *space,
                                          uint64_t iova,
                                          uint64_t len,
                                          uint64_t *unpinned);

/**
 * Has the unit forget what was unmapped when a flush failed, and unpins it.
 *
 * Fails with ARGUMENT, FLUSH, PIN or BUSY.
 */
enum dmaspace_status dmaspace_space_flush(const struct dmaspace_space *space);

/**
 * The leaf that maps `iova`.
 *
 * Fails with NOT_MAPPED, ARGUMENT or BUSY.
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
 * The version of this library, like "0.1.0". It is this library's, and stays.
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
 * Unmaps a range, all of which must be mapped, and has the units forget it.
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
 * Has the units forget what was unmapped when a flush failed, and calls `released` for it, as
 * `dmaspace_table_unmap` does. With nothing to forget neither is called.
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
