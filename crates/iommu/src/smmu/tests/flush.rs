//! The words of commands, and tables that are unlinked.

use iopt::{Gather, NoRuns, TableOps as _};

use super::*;

/// Words of commands, by format and version: the page's number and the tag are where they belong.
#[test]
fn commands_name_page_and_tag_as_their_format_has_them() {
    let what = |unlinked| iopt::Invalidation::of(Span::new(0x8765_4000, 0x1000), 1, unlinked);
    let received = |root: Root, config, idr2, unlinked| {
        let (driver, model) = unit_with(memory(), config, [IDR0, IDR1 & !(3 << 16), idr2]);
        driver.enable().unwrap();
        // Not the bank of number 0.
        let format = FormatId::ArmV7s;
        let other = Root {
            format,
            address: 0,
            levels: 2,
        };
        for n in 0..3 {
            driver.attach(DeviceId(n), DomainId(n), other).unwrap();
        }
        driver.attach(DEVICE, DOMAIN, root).unwrap();
        model.received();
        driver.invalidate(DOMAIN, &what(unlinked)).unwrap();
        model.received()
    };
    let sync = ("TLBSYNC", 3, 0);
    let stage = |format: fn(iopt::format::ArmConfig) -> FormatId, input_bits, levels| Root {
        format: format(iopt::format::ArmConfig {
            granule: iopt::format::ArmGranule::K4,
            input_bits,
            upper: false,
        }),
        address: 1 << 20,
        levels,
    };
    let host = stage(FormatId::ArmStage1, 48, 4);
    let wide = 3 << 48 | 0x8_7654;
    assert_eq!(
        received(host, V2, IDR2, false),
        [("TLBIVAL", 3, wide), sync]
    );
    assert_eq!(received(host, V2, IDR2, true), [("TLBIVA", 3, wide), sync]);
    let guest = stage(FormatId::ArmStage2, 40, 3);
    let page = 0x8_7654;
    assert_eq!(
        received(guest, V2, IDR2, false),
        [("TLBIIPAS2L", 3, page), sync]
    );
    assert_eq!(
        received(guest, V2, IDR2, true),
        [("TLBIIPAS2", 3, page), sync]
    );
    // Its VMID is not that of stage 1.
    let all = [("TLBIVMID", 0, 4), ("TLBGSYNC", 0, 0)];
    assert_eq!(received(guest, V1, IDR2_V1, false), all);
    let host = stage(FormatId::ArmStage1, 32, 3);
    let narrow = 0x8765_4003;
    assert_eq!(
        received(host, V1, IDR2_V1, false),
        [("TLBIVA", 3, narrow), sync]
    );
    let short = Root {
        format: FormatId::ArmV7s,
        address: 1 << 20,
        levels: 2,
    };
    assert_eq!(
        received(short, V2, IDR2, false),
        [("TLBIVAL", 3, narrow), sync]
    );
}

#[test]
fn a_table_that_was_unlinked_is_not_walked_any_more() {
    let (driver, model, memory) = enabled();
    let mut table = first(&memory, 0);
    driver.attach(DEVICE, DOMAIN, table.root()).unwrap();
    model.state().latency = 4;
    assert_eq!(model.access(STREAM, 0, false), Seen::Translated(DATA));
    let mut gather = Gather::new();
    table
        .unmap(Span::new(0, 16 << 12), &mut gather, &mut NoRuns)
        .unwrap();
    assert!(gather.invalidation().tables_unlinked());
    let there = Seen::Translated(DATA);
    assert_eq!(model.access(STREAM, 0, false), there, "still cached");
    let flushed = gather.flush_with(|what| driver.invalidate(DOMAIN, what));
    table.reclaim(flushed.unwrap());
    assert!(model.state().tables.is_empty());
    assert_eq!(model.access(STREAM, 0, false), NOT_PRESENT);
    // And mapping needs no flush.
    let before = driver.counters();
    table
        .map(0, &[Span::new(DATA, 0x1000)], Prot::READ)
        .unwrap();
    assert_eq!(model.access(STREAM, 0, false), there);
    assert_eq!(driver.counters(), before);
}
