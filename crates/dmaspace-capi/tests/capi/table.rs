//! Tables: every format maps, translates and unmaps, and every refusal has its code.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use dmaspace_capi::*;

use crate::{Callbacks, config, done, flush, released, said};

/// A table of `config` in memory that is taken.
fn table(config: &TableConfig) -> *mut Table {
    let mut table = ptr::null_mut();
    // SAFETY: lent for the call.
    done(unsafe { dmaspace_table_new(config, ptr::null(), &raw mut table) });
    table
}

fn info(table: *mut Table) -> TableInfo {
    let mut info = TableInfo::default();
    // SAFETY: the handle is there.
    done(unsafe { dmaspace_table_get_info(table, &raw mut info) });
    info
}

#[test]
fn a_table_of_each_format_maps_translates_and_unmaps() {
    for index in 0..dmaspace_format_count() {
        // SAFETY: the name stays.
        let name = unsafe { CStr::from_ptr(dmaspace_format_name(index)) };
        let table = table(&config(name));
        let before = info(table);
        let page = 1u64 << before.page_sizes.trailing_zeros();
        assert!(
            before.root.address != 0 && before.root.levels >= 1,
            "{name:?}"
        );
        let memory = [
            Span {
                start: 16 * page,
                len: 3 * page,
            },
            Span {
                start: 4 * page,
                len: page,
            },
        ];
        let iova = 64 * page;
        let mut told = Callbacks::default();
        let mut leaf = Leaf::default();
        // SAFETY: the handle is there, and all else is lent for the calls.
        unsafe {
            done(dmaspace_table_map(
                table,
                iova,
                memory.as_ptr(),
                2,
                DMASPACE_READ | DMASPACE_WRITE,
            ));
            done(dmaspace_table_translate(
                table,
                iova + 3 * page + 5,
                &raw mut leaf,
            ));
            assert_eq!(
                leaf.run,
                Run {
                    iova: iova + 3 * page,
                    pa: 4 * page,
                    len: page
                },
                "{name:?}"
            );
            assert_eq!(leaf.prot & 3, DMASPACE_READ | DMASPACE_WRITE, "{name:?}");
            let context = told.context();
            done(dmaspace_table_unmap(
                table,
                iova,
                4 * page,
                Some(flush),
                Some(released),
                context,
            ));
            let gone = dmaspace_table_translate(table, iova, &raw mut leaf);
            assert_eq!(gone, Status::NotMapped, "{name:?}");
        }
        assert_eq!(
            told.flushed,
            [Span {
                start: iova,
                len: 4 * page
            }],
            "{name:?}"
        );
        assert_eq!(told.leaf_levels & 1, 1, "{name:?}");
        let bytes: u64 = told.released.iter().map(|run| run.len).sum();
        assert_eq!((told.released.len(), bytes), (2, 4 * page), "{name:?}");
        assert_eq!(info(table).tables, before.tables, "{name:?}");
        // SAFETY: nobody uses it any more.
        done(unsafe { dmaspace_table_destroy(table) });
    }
}

#[test]
fn tables_lie_in_memory_of_the_caller_and_say_so() {
    const BYTES: usize = 1 << 20;
    const BASE: u64 = 0x4000_0000;
    let mut pages = vec![[!0u64; 512]; 2 * BYTES / 4096];
    let start = pages.as_mut_ptr().cast::<u8>();
    let start = start.wrapping_add(start.align_offset(BYTES.min(1 << 16)));
    let memory = |bytes| TableMemory {
        start: start.cast(),
        bytes,
        base: BASE,
    };
    let mut table = ptr::null_mut();
    let config = config(c"vtd-ss");
    // SAFETY: the memory stays until the end of the test, and is this table's.
    unsafe {
        let odd = memory(BYTES as u64 - 4096);
        let status = dmaspace_table_new(&raw const config, &raw const odd, &raw mut table);
        assert_eq!(status, Status::TableMemory, "{}", said());
        let good = memory(BYTES as u64);
        done(dmaspace_table_new(
            &raw const config,
            &raw const good,
            &raw mut table,
        ));
        let root = info(table).root.address;
        assert!((BASE..BASE + BYTES as u64).contains(&root), "{root:#x}");
        let entry = start.add((root - BASE) as usize).cast::<u64>();
        assert_eq!(entry.read_volatile(), 0, "what was there is cleared");
        let span = Span {
            start: 0x8000_0000,
            len: 1 << 39,
        };
        // Bits 0 and 1 are read and write, bit 7 says that it is a leaf.
        let status = dmaspace_table_map(table, 0, &raw const span, 1, DMASPACE_READ);
        done(status);
        assert_eq!(entry.read_volatile() & 3, 3, "the root leads to a table");
        done(dmaspace_table_destroy(table));
        let short = crate::config(c"armv7-short");
        let status = dmaspace_table_new(&raw const short, &raw const good, &raw mut table);
        assert_eq!(status, Status::TableMemory);
    }
}

#[test]
fn each_refusal_has_its_code_and_changes_nothing() {
    let mut small = config(c"vtd-ss");
    small.max_leaf = 4096;
    let table = table(&small);
    let map = |iova, start, len, prot| {
        let span = Span { start, len };
        // SAFETY: the handle is there, and the rest is lent for the call.
        unsafe { dmaspace_table_map(table, iova, &raw const span, 1, prot) }
    };
    // SAFETY: the handle is there.
    let unmap =
        |iova, len| unsafe { dmaspace_table_unmap(table, iova, len, None, None, ptr::null_mut()) };
    done(map(0x10_0000, 0x20_0000, 0x4000, DMASPACE_READ));
    assert_eq!(map(0x10_0001, 0, 0x1000, DMASPACE_READ), Status::Range);
    assert_eq!(map(0, 0, 0, DMASPACE_READ), Status::Range);
    assert_eq!(map(1 << 60, 0, 0x1000, DMASPACE_READ), Status::Range);
    assert_eq!(map(0x10_3000, 0, 0x2000, DMASPACE_READ), Status::Overlap);
    assert!(said().contains("overlaps what is mapped"), "{}", said());
    assert_eq!(map(0, 0, 0x1000, DMASPACE_UNCACHED), Status::Prot);
    assert_eq!(
        map(1 << 32, 0, 2 << 30, DMASPACE_READ),
        Status::TableMemory,
        "{}",
        said()
    );
    assert_eq!(unmap(0x10_0000, 0x5000), Status::NotMapped);
    assert_eq!(unmap(u64::MAX - 4095, 0x2000), Status::Range);
    done(unmap(0x10_0000, 0x4000));
    // SAFETY: nobody uses it any more.
    done(unsafe { dmaspace_table_destroy(table) });

    let large = self::table(&config(c"vtd-ss"));
    let span = Span {
        start: 0,
        len: 2 << 20,
    };
    // SAFETY: the handle is there, and the rest is lent for the calls.
    unsafe {
        done(dmaspace_table_map(
            large,
            0,
            &raw const span,
            1,
            DMASPACE_READ,
        ));
        let cut = dmaspace_table_unmap(large, 0, 4096, None, None, ptr::null_mut());
        assert_eq!(cut, Status::Cuts);
        done(dmaspace_table_destroy(large));
    }
}

#[test]
fn nothing_is_released_before_a_flush_has_succeeded() {
    let table = table(&config(c"amdv1"));
    let span = Span {
        start: 0x1000,
        len: 0x1000,
    };
    let mut told = Callbacks {
        answer: -5,
        ..Callbacks::default()
    };
    // SAFETY: the handle is there, and the rest is lent for the calls.
    unsafe {
        done(dmaspace_table_map(
            table,
            0,
            &raw const span,
            1,
            DMASPACE_WRITE,
        ));
        let context = told.context();
        let status = dmaspace_table_unmap(table, 0, 0x1000, Some(flush), Some(released), context);
        assert_eq!(
            (status, said()),
            (Status::Flush, "the flush callback has answered -5".into())
        );
        assert_eq!(told.released, []);
        let context = told.context();
        let again = dmaspace_table_flush(table, Some(flush), Some(released), context);
        assert_eq!(again, Status::Flush);
        told.answer = 0;
        let context = told.context();
        done(dmaspace_table_flush(
            table,
            Some(flush),
            Some(released),
            context,
        ));
        assert_eq!(
            told.released,
            [Run {
                iova: 0,
                pa: 0x1000,
                len: 0x1000
            }]
        );
        assert_eq!(
            told.flushed,
            [Span {
                start: 0,
                len: 0x1000
            }]
        );
        done(dmaspace_table_flush(
            table,
            Some(flush),
            Some(released),
            told.context(),
        ));
        assert_eq!(told.released.len(), 1, "once");
        done(dmaspace_table_destroy(table));
    }
}

#[test]
fn a_driver_maps_and_unmaps_counts_of_pages_as_far_as_a_table_goes() {
    const LARGE: u64 = 2 << 20;
    let table = table(&config(c"vtd-ss"));
    let (mut told, mut pages) = (Callbacks::default(), 0);
    let rights = DMASPACE_READ | DMASPACE_WRITE;
    // SAFETY: the handle is there, and the rest is lent for the calls.
    unsafe {
        // Three pages are left in the table.
        let at = LARGE - 3 * 0x1000;
        let (pa, of) = (1 << 32, 0x1000);
        done(dmaspace_table_map_pages(
            table,
            at,
            pa,
            of,
            10,
            rights,
            &raw mut pages,
        ));
        assert_eq!(pages, 3);
        let again = dmaspace_table_map_pages(table, at - of, pa, of, 10, rights, &raw mut pages);
        assert_eq!((again, pages), (Status::Overlap, 1));
        // 4 MiB as two pages of 2 MiB are one call.
        done(dmaspace_table_map_pages(
            table,
            LARGE * 512,
            pa,
            LARGE,
            2,
            rights,
            &raw mut pages,
        ));
        assert_eq!(pages, 2);
        let whole = dmaspace_table_unmap_pages(table, LARGE * 512, of, 2, &raw mut pages);
        assert_eq!((whole, pages), (Status::Cuts, 0));
        let end = dmaspace_table_unmap_pages(table, LARGE * 512, LARGE, 3, &raw mut pages);
        assert_eq!((end, pages), (Status::NotMapped, 2));
        done(dmaspace_table_unmap_pages(
            table,
            at - of,
            of,
            4,
            &raw mut pages,
        ));
        assert_eq!(pages, 4);
        done(dmaspace_table_flush(
            table,
            Some(flush),
            Some(released),
            told.context(),
        ));
        assert_eq!((told.flushed.len(), told.released.len()), (2, 0));
        assert_eq!(info(table).tables, 1);
        done(dmaspace_table_destroy(table));
    }
}

/// Uses the table that calls it.
///
/// # Safety
///
/// `context` is the table.
unsafe extern "C" fn meddle(context: *mut c_void, _what: *const Invalidation) -> c_int {
    // SAFETY: the caller's promise.
    let status = unsafe { dmaspace_table_destroy(context.cast()) };
    assert_eq!(status, Status::Busy);
    0
}

#[test]
fn a_callback_cannot_use_the_handle_that_called_it() {
    let table = table(&config(c"riscv"));
    let span = Span {
        start: 0x1000,
        len: 0x1000,
    };
    // SAFETY: the handle is there, and the rest is lent for the calls.
    unsafe {
        done(dmaspace_table_map(
            table,
            0,
            &raw const span,
            1,
            DMASPACE_READ,
        ));
        done(dmaspace_table_unmap(
            table,
            0,
            0x1000,
            Some(meddle),
            None,
            table.cast(),
        ));
        assert_eq!(said(), "table is in use");
        done(dmaspace_table_destroy(table));
    }
}
