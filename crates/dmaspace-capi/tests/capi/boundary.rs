//! What the boundary refuses: bad pointers, bad numbers, panics.

use std::ffi::CStr;
use std::ptr;

use dmaspace_capi::*;

use crate::{config, done, said};

#[test]
fn a_panic_is_a_code_and_no_unwinding() {
    let status = guarded(|| panic!("for the test"));
    assert_eq!(status, Status::Panic);
    assert_eq!(said(), "a bug of dmaspace: for the test");
}

#[test]
fn the_formats_are_listed_by_name() {
    let mut names = Vec::new();
    for index in 0..dmaspace_format_count() {
        // SAFETY: the function's answer is a text that stays.
        names.push(
            unsafe { CStr::from_ptr(dmaspace_format_name(index)) }
                .to_str()
                .unwrap(),
        );
    }
    assert!(names.contains(&"vtd-ss") && names.contains(&"dart2"));
    assert!(dmaspace_format_name(names.len()).is_null());
    // SAFETY: as above.
    let version = unsafe { CStr::from_ptr(dmaspace_version()) };
    assert_eq!(version.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn null_and_misaligned_pointers_are_refused_by_name() {
    let mut table = ptr::null_mut();
    let good = config(c"vtd-ss");
    // SAFETY: refused, or lent for the call.
    unsafe {
        let status = dmaspace_table_new(ptr::null(), ptr::null(), &raw mut table);
        assert_eq!(
            (status, said()),
            (Status::Argument, "config is NULL".into())
        );
        let status = dmaspace_table_new(&raw const good, ptr::null(), ptr::null_mut());
        assert_eq!((status, said()), (Status::Argument, "table is NULL".into()));
        let status = dmaspace_table_get_info(ptr::null(), ptr::null_mut());
        assert_eq!((status, said()), (Status::Argument, "table is NULL".into()));

        done(dmaspace_table_new(
            &raw const good,
            ptr::null(),
            &raw mut table,
        ));
        let mut info = [TableInfo::default(); 2];
        let off = (&raw mut info).cast::<TableInfo>().byte_add(1);
        assert_eq!(dmaspace_table_get_info(table, off), Status::Argument);
        assert!(said().ends_with("not aligned to 8 bytes"), "{}", said());
        let status = dmaspace_table_map(table, 0, ptr::null(), 1, DMASPACE_READ);
        assert_eq!(
            (status, said()),
            (Status::Argument, "memory is NULL".into())
        );
        let span = Span::default();
        let status = dmaspace_table_map(table, 0, &raw const span, usize::MAX, DMASPACE_READ);
        assert_eq!(status, Status::Argument);
        let status = dmaspace_table_map(table, 0, &raw const span, 1, 1 << 31);
        assert_eq!(status, Status::Argument);
        assert_eq!(
            said(),
            "permissions 0x80000000 have unknown bits 0x80000000"
        );
        let odd = table.byte_add(1);
        assert_eq!(dmaspace_table_destroy(odd), Status::Argument);
        done(dmaspace_table_destroy(table));
        done(dmaspace_table_destroy(ptr::null_mut()));
        done(dmaspace_space_destroy(ptr::null_mut()));
        done(dmaspace_memory_destroy(ptr::null_mut()));
    }
}

#[test]
fn a_table_that_does_not_exist_is_refused_with_its_numbers() {
    let mut table = ptr::null_mut();
    let mut refused = |change: &dyn Fn(&mut TableConfig)| {
        let mut config = config(c"arm-s1-4k");
        change(&mut config);
        // SAFETY: lent for the call.
        unsafe { dmaspace_table_new(&raw const config, ptr::null(), &raw mut table) }
    };
    assert_eq!(
        refused(&|config| config.format = c"vtd".as_ptr()),
        Status::Format
    );
    assert!(
        said().starts_with("no format is called \"vtd\""),
        "{}",
        said()
    );
    assert_eq!(refused(&|config| config.levels = 7), Status::Format);
    assert_eq!(refused(&|config| config.input_bits = 60), Status::Format);
    assert_eq!(refused(&|config| config.max_leaf = 2048), Status::Format);
    assert_eq!(
        said(),
        "arm-s1-4k has no leaves below 0x1000 bytes; 0x800 asked for"
    );
    assert_eq!(
        refused(&|config| config.format = c"\xff".as_ptr()),
        Status::Argument
    );
    assert!(table.is_null());
}
