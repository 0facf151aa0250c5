/*
 * Memory that a user-space driver registers and translates by address, as SPDK (spdk_mem_register, _unregister,
 * spdk_vtophys) and DPDK (rte_extmem_register, _unregister, rte_mem_virt2iova) have it: regions of 2 MiB by the thousand,
 * each with a device address of its own. The map is an I/O page table of this library, whose addresses are those of the
 * process. Beside it is a plain table with the same answers, and the time that both take.
 *
 *   gcc -std=c11 -O2 -I crates/dmaspace-capi/include examples/c/register.c \
 *       -L target/release -ldmaspace_capi -Wl,-rpath,$PWD/target/release -o register
 *   ./register 65536
 */
#define _POSIX_C_SOURCE 199309L
#include "dmaspace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REGION (UINT64_C(2) << 20)
#define UNKNOWN UINT64_MAX
#define BASE UINT64_C(0x200000000000)

/* The map: the library's table. */

/* Registers `regions` regions from `address` on, the n-th at the device address `iova[n]`: all of them or none. */
static int mem_register(dmaspace_table *map, uint64_t address, const uint64_t *iova, size_t regions)
{
    dmaspace_span spans[64];

    /* The table would take pages of 4 KiB, too; these callers count in regions. */
    if (address % REGION != 0) {
        return -EINVAL;
    }
    for (size_t done = 0; done < regions;) {
        size_t count = regions - done < 64 ? regions - done : 64;
        for (size_t n = 0; n < count; n++) {
            spans[n] = (dmaspace_span){.start = iova[done + n], .len = REGION};
        }
        dmaspace_status status =
            dmaspace_table_map(map, address + done * REGION, spans, count, DMASPACE_READ | DMASPACE_WRITE);
        if (status != DMASPACE_STATUS_OK) {
            if (done > 0) {
                dmaspace_table_unmap(map, address, done * REGION, NULL, NULL, NULL);
            }
            return status == DMASPACE_STATUS_OVERLAP ? -EBUSY : -EINVAL;
        }
        done += count;
    }
    return 0;
}

/* All of the range must be registered. A driver whose device walks the map gives a function that flushes. */
static int mem_unregister(dmaspace_table *map, uint64_t address, uint64_t len)
{
    if ((address | len) % REGION != 0) {
        return -EINVAL;
    }
    switch (dmaspace_table_unmap(map, address, len, NULL, NULL, NULL)) {
    case DMASPACE_STATUS_OK:
        return 0;
    case DMASPACE_STATUS_NOT_MAPPED:
        return -ENOENT;
    default:
        return -EINVAL;
    }
}

/* The device address; `len`, if it is not NULL, is cut to the bytes that follow it there. */
static uint64_t vtophys(const dmaspace_table *map, uint64_t address, uint64_t *len)
{
    dmaspace_leaf leaf;

    if (dmaspace_table_translate(map, address, &leaf) != DMASPACE_STATUS_OK) {
        return UNKNOWN;
    }
    uint64_t offset = address - leaf.run.iova;
    if (len != NULL && *len > leaf.run.len - offset) {
        *len = leaf.run.len - offset;
    }
    return leaf.run.pa + offset;
}

/* The plain table: a word for each region of an address range that is known from the beginning. */
struct plain {
    uint64_t *iova;
    size_t regions;
};

static int plain_register(struct plain *map, uint64_t address, const uint64_t *iova, size_t regions)
{
    size_t first = (address - BASE) / REGION;

    for (size_t n = 0; n < regions; n++) {
        if (map->iova[first + n] != UNKNOWN) {
            return -EBUSY;
        }
    }
    memcpy(map->iova + first, iova, regions * sizeof *iova);
    return 0;
}

static int plain_unregister(struct plain *map, uint64_t address, uint64_t len)
{
    size_t first = (address - BASE) / REGION, regions = len / REGION;

    for (size_t n = 0; n < regions; n++) {
        if (map->iova[first + n] == UNKNOWN) {
            return -ENOENT;
        }
    }
    for (size_t n = 0; n < regions; n++) {
        map->iova[first + n] = UNKNOWN;
    }
    return 0;
}

static uint64_t plain_vtophys(const struct plain *map, uint64_t address)
{
    size_t region = (address - BASE) / REGION;

    if (address < BASE || region >= map->regions || map->iova[region] == UNKNOWN) {
        return UNKNOWN;
    }
    return map->iova[region] + address % REGION;
}

static void check(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "it does not hold: %s (%s)\n", what, dmaspace_last_error());
        exit(EXIT_FAILURE);
    }
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static uint64_t next(uint64_t *random)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return *random;
}

static void row(const char *what, double ours, double plain, size_t times)
{
    printf("  %-28s %8.1f %8.1f\n", what, ours / (double)times, plain / (double)times);
}

int main(int count, char **arguments)
{
    size_t regions = count > 1 ? strtoull(arguments[1], NULL, 0) : 4096;
    uint64_t random = 88172645463325252, len = 3 * REGION, sum[2] = {0, 0};
    double begin, register_time[2], translate_time[2], unregister_time[2];

    if (regions < 64 || regions > (1 << 20)) {
        fprintf(stderr, "usage: register [REGIONS]\n  of 2 MiB, from 64 to %d\n", 1 << 20);
        return 2;
    }
    /* A table of 4 KiB for 512 regions, and as many again for what lies above. */
    size_t bytes = 1 << 20;
    while (bytes < 16 * regions) {
        bytes *= 2;
    }
    dmaspace_table_memory memory = {.bytes = bytes};
    dmaspace_table_config config = {.format = "vtd-ss"};
    dmaspace_table *map = NULL;
    struct plain plain = {.iova = malloc(regions * sizeof(uint64_t)), .regions = regions};
    uint64_t *iova = malloc(regions * sizeof(uint64_t));
    check(plain.iova != NULL && iova != NULL, "there is memory");
    check(dmaspace_table_new(&config, &memory, &map) == DMASPACE_STATUS_OK, "a table");
    for (size_t n = 0; n < regions; n++) {
        plain.iova[n] = UNKNOWN;
        /* No two follow each other, as huge pages of a machine that has been up for a while. */
        iova[n] = (UINT64_C(1) << 40) + 2 * n * REGION;
    }

    /* One by one, as a program registers what it allocates. */
    begin = now();
    for (size_t n = 0; n < regions; n++) {
        check(mem_register(map, BASE + n * REGION, iova + n, 1) == 0, "register");
    }
    register_time[0] = now() - begin;
    begin = now();
    for (size_t n = 0; n < regions; n++) {
        check(plain_register(&plain, BASE + n * REGION, iova + n, 1) == 0, "register");
    }
    register_time[1] = now() - begin;

    check(mem_register(map, BASE + REGION, iova, 2) == -EBUSY, "no region is registered twice");
    check(mem_register(map, BASE + 4096, iova, 1) == -EINVAL, "regions are whole");
    check(mem_unregister(map, BASE, 4096) == -EINVAL, "no part of a region is unregistered");
    check(mem_unregister(map, BASE + (regions - 1) * REGION, 2 * REGION) == -ENOENT, "all of it must be there");
    check(vtophys(map, BASE + regions * REGION, NULL) == UNKNOWN, "nothing is behind the last");
    check(vtophys(map, BASE + 12345, &len) == iova[0] + 12345 && len == REGION - 12345, "a region ends");

    size_t times = 1 << 20;
    for (int which = 0; which < 2; which++) {
        random = 88172645463325252;
        begin = now();
        for (size_t n = 0; n < times; n++) {
            uint64_t address = BASE + next(&random) % (regions * REGION);
            sum[which] += which == 0 ? vtophys(map, address, NULL) : plain_vtophys(&plain, address);
        }
        translate_time[which] = now() - begin;
    }
    check(sum[0] == sum[1], "both have the same answers");

    begin = now();
    for (size_t n = 0; n < regions; n += 64) {
        size_t these = regions - n < 64 ? regions - n : 64;
        check(mem_unregister(map, BASE + n * REGION, these * REGION) == 0, "unregister");
    }
    unregister_time[0] = now() - begin;
    begin = now();
    for (size_t n = 0; n < regions; n += 64) {
        size_t these = regions - n < 64 ? regions - n : 64;
        check(plain_unregister(&plain, BASE + n * REGION, these * REGION) == 0, "unregister");
    }
    unregister_time[1] = now() - begin;
    check(vtophys(map, BASE, NULL) == UNKNOWN && plain_vtophys(&plain, BASE) == UNKNOWN, "all are gone");

    printf("%zu regions of 2 MiB: ns each      table    plain\n", regions);
    row("register, one by one", register_time[0], register_time[1], regions);
    row("translate, at random", translate_time[0], translate_time[1], times);
    row("unregister, 64 at a time", unregister_time[0], unregister_time[1], regions);
    check(dmaspace_table_destroy(map) == DMASPACE_STATUS_OK, "end the table");
    free(plain.iova);
    free(iova);
    printf("everything was given back\n");
    return EXIT_SUCCESS;
}
