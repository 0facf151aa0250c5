//! VT-d's tables as a kernel shows them.

use std::convert::Infallible;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::tables::tests::images::parsed;
use crate::tables::{Limits, TableFile, Tables, TablesError, diff, explain, survey};
use iopt::walk::{Access, WalkMemory};
use iopt::{AnyTable, FormatId, HeapTables, Prot, Root};
use proptest::prelude::*;
use runs::{PageSizes, Span};

/// Where the next table or the page is, in an entry.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// As the kernel's documentation has it (Documentation/ABI/testing/debugfs-intel-iommu), with a leaf of 2 MiB,
/// and one of 1 GiB as older kernels print it.
const TEXT: &str = "\
Device 0000:00:1f.0 @0x1017f8000
IOVA_PFN         \tPML5E             \tPML4E             \tPDPE              \tPDE               \tPTE
0x000000008d800 |\t0x0000000000000000\t0x00000001017f9003\t0x00000001017fa003\t0x00000001017fb003\t0x000000008d800003
0x000000008d801 |\t0x0000000000000000\t0x00000001017f9003\t0x00000001017fa003\t0x00000001017fb003\t0x000000008d801001
0x000000008da00 |\t0x0000000000000000\t0x00000001017f9003\t0x00000001017fa003\t0x000000008da00083
0x00000000c0000 |\t0x0000000000000000\t0x00000001017f9003\t0x0000000140000083\t0x0000000000000000\t0x0000000000000000

";

fn read(text: impl AsRef<[u8]>, device: Option<&str>) -> Result<TableFile, TablesError> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("domain_translation_struct");
    fs::write(&file, text).unwrap();
    let read = TableFile::open_kernel_text(&file, device);
    if device.is_none() {
        // It is known by what it begins with.
        let opened = TableFile::open(&file, None);
        assert_eq!(opened.is_ok(), read.is_ok());
    }
    read
}

/// The refusal, without the file's name, which is said before it and says nothing of it.
fn refusal(text: &str, device: Option<&str>) -> String {
    let error = read(text, device).unwrap_err();
    match &error {
        TablesError::Kernel { path, cause } => {
            let said = format!("cannot decode {}: {cause}", path.display());
            assert_eq!(crate::output::sentence(&error), said);
            cause.to_string()
        }
        other => panic!("{other}"),
    }
}

fn root(file: &TableFile) -> Root {
    file.tables().unwrap().root()
}

fn walk(file: &TableFile, iova: u64, access: Access) -> Option<u64> {
    let tables = file.tables().unwrap();
    let found = tables.walker().walk(&tables, iova, access, &mut ());
    found.ok().map(|found| found.pa)
}

#[test]
fn the_kernels_example_is_walked() {
    let tables = read(TEXT, None).unwrap();
    let expected = Root {
        format: FormatId::VtdSs,
        address: 0x1_017f_8000,
        levels: 4,
    };
    assert_eq!(root(&tables), expected);
    for (iova, read, write) in [
        (0x8d80_0123, Some(0x8d80_0123), Some(0x8d80_0123)),
        (0x8d80_1000, Some(0x8d80_1000), None),
        (0x8d80_2000, None, None),
        (0x8dbf_ffff, Some(0x8dbf_ffff), Some(0x8dbf_ffff)),
        (0x8dc0_0000, None, None),
        (0xdfff_f000, Some(0x1_5fff_f000), Some(0x1_5fff_f000)),
        // No row leads through this entry of the root.
        (1 << 39, None, None),
    ] {
        let found = [Access::Read, Access::Write].map(|access| walk(&tables, iova, access));
        assert_eq!(found, [read, write], "{iova:#x}");
    }
}

#[test]
fn one_device_of_several_is_chosen() {
    let second = "Device 0000:00:0a.0 with pasid 2 @0x1083d1000\nIOVA_PFN\n";
    let third = "Device 0000:00:0a.0 with pasid 3 @0x1083d2000\nIOVA_PFN\n";
    let text = [TEXT, second, third].concat();
    for (device, root) in [
        ("0000:00:1f.0", 0x1_017f_8000),
        ("0000:00:0a.0/2", 0x1_083d_1000),
    ] {
        let found = self::root(&read(&text, Some(device)).unwrap());
        assert_eq!(found.address, root);
    }
    let refusal = |device| refusal(&text, device);
    let names = "0000:00:1f.0, 0000:00:0a.0/2, 0000:00:0a.0/3";
    assert_eq!(refusal(None), format!("it has the tables of {names}"));
    assert_eq!(
        refusal(Some("0000:00:0a.0")),
        format!("it has the tables of {names}")
    );
    let other = Some("0000:00:02.0");
    assert_eq!(
        refusal(other),
        format!("it has no tables of 0000:00:02.0, but of {names}")
    );
    let none = TableFile::open_kernel_text(Path::new("/dev/null"), None);
    assert!(matches!(none, Err(TablesError::NoKernelText { .. })));
}

#[test]
fn what_does_not_fit_together_is_refused_with_its_line() {
    let (head, first) = TEXT.split_at(TEXT.find("0x000000008d801").unwrap());
    let error = |row: &str| refusal(&format!("{head}{row}\n"), None);
    let row = "0x000000008d802 | 0x0 0x1017f9003 0x1017fa003 0x1017fb003 0x8d802003";
    assert!(read(format!("{head}{row}\n{first}"), None).is_ok());
    for wrong in [
        // Not aligned, three levels among four, an entry that is not present, too few and too many.
        "0x000000008d802 | 0x0 0x1017f9003 0x1017fa003 0x8d800083",
        "0x000000008d802 | 0x0 0x0 0x1017fa003 0x1017fb003 0x8d802003",
        "0x000000008d802 | 0x0 0x1017f9003 0x1017fa003 0x1017fb003 0x8d802000",
        "0x000000008d802 | 0x0 0x1017f9003",
        "0x000000008d802 | 0x0 0x1017f9003 0x1017fa003 0x1017fb003 0x8d802003 0x8d802003",
        "0x000000008d802 | 0x0 0x1017f9003 0x1017fa003 0x1017fb003 0x+8d802003",
        "0x2000000000000 | 0x0 0x1017f9003 0x1017fa003 0x1017fb003 0x8d802003",
        "Device 0000:00:1f.0 0x1017f8000",
        "no row",
    ] {
        assert!(
            error(wrong).starts_with("line 4 is no row"),
            "{wrong}: {}",
            error(wrong)
        );
    }
    let torn = error("0x000000008d801 | 0x0 0x1017f9003 0x1017fa003 0x1017fc003 0x8d801003");
    assert_eq!(
        torn,
        "line 4: the entry at 0x1017fa360 is 0x1017fc003, and in an earlier line 0x1017fb003: the tables \
         have changed while they were printed"
    );
    let endless = format!("{head}{}", "0".repeat(1 << 16));
    assert!(refusal(&endless, None).starts_with("line 4"));
}

/// As the kernel prints tables: `pgtable_walk_level` and `dump_page_info` in drivers/iommu/intel/debugfs.c.
fn print(memory: &impl WalkMemory, root: Root) -> String {
    fn level(
        text: &mut String,
        memory: &impl WalkMemory,
        table: u64,
        at: usize,
        pfn: u64,
        way: &mut [u64; 5],
    ) {
        for index in 0..512 {
            let entry = memory.read_u64(table + 8 * index).unwrap();
            if entry & 3 == 0 {
                continue;
            }
            let pfn = pfn + (index << (9 * at));
            way[at] = entry;
            if at == 0 || entry & 0x80 != 0 {
                let [pte, pde, rest @ ..] = *way;
                let mut columns = vec![rest[2], rest[1], rest[0]];
                columns.extend([pde, pte].into_iter().take_while(|entry| *entry != 0));
                let columns: Vec<_> = columns
                    .iter()
                    .map(|entry| format!("\t{entry:#018x}"))
                    .collect();
                text.push_str(&format!("{pfn:#015x} |{}\n", columns.concat()));
            } else {
                level(text, memory, entry & ADDRESS, at - 1, pfn, way);
            }
            way[at] = 0;
        }
    }
    let mut text = format!("Device 0000:00:05.0 @{:#x}\nIOVA_PFN\n", root.address);
    let top = usize::from(root.levels) - 1;
    level(&mut text, memory, root.address, top, 0, &mut [0; 5]);
    text
}

fn tables_by_the_engine(format: FormatId, levels: u8, maps: &[(u64, u64, u64, bool)]) {
    let memory = Arc::new(HeapTables::with_tables(256).unwrap());
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let table = AnyTable::new(format, levels, sizes, memory.clone()).unwrap();
    for (iova, address, pages, write) in maps {
        let prot = if *write { Prot::RW } else { Prot::READ };
        // Where one is mapped already, the other is left out.
        let _ = table.map(
            *iova << 12,
            &[Span::new(*address << 12, *pages << 12)],
            prot,
        );
    }
    let text = print(&&memory, table.root());
    let read = read(&text, None).unwrap();
    let mut image = Vec::new();
    let mut sink = |bytes: &[u8]| {
        image.extend_from_slice(bytes);
        Ok::<_, Infallible>(())
    };
    let Ok(_) = table.write_image(&mut sink);
    let live = Tables::of_image(parsed(&image));
    let [found, expected] =
        [read.tables().unwrap(), live].map(|tables| survey(&tables, Limits::default()));
    assert!(diff(&expected, &found).is_same(), "{text}");
    if maps.is_empty() {
        return;
    }
    assert_eq!(root(&read), table.root());
    assert_eq!(found.leaves, expected.leaves);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tables_are_the_same_when_they_were_printed(
        format in prop_oneof![
            Just((FormatId::VtdSs, 3)), Just((FormatId::VtdSs, 4)), Just((FormatId::VtdSs, 5)),
            Just((FormatId::X86_64, 4)), Just((FormatId::X86_64, 5)),
        ],
        maps in prop::collection::vec(
            (0u64..1 << 19, 0u64..1 << 20, 1u64..700, any::<bool>()), 0..6
        ),
    ) {
        tables_by_the_engine(format.0, format.1, &maps);
    }

    #[test]
    fn large_leaves_are_the_same_when_they_were_printed(
        maps in prop::collection::vec(
            (0u64..512, 0u64..512, 1u64..4, any::<bool>()), 0..6
        ),
        shift in prop_oneof![Just(9), Just(18)],
    ) {
        let maps: Vec<_> = maps.into_iter().map(|(iova, address, count, write)| {
            (iova << shift, address << shift, count << shift, write)
        }).collect();
        tables_by_the_engine(FormatId::VtdSs, 4, &maps);
    }

    #[test]
    fn any_bytes_survive(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = read([b"Device 0:0 @0x1000\n", bytes.as_slice()].concat(), None);
        let _ = read(bytes, None);
    }

    /// Texts that are nearly right: lines of the example, words of which are exchanged.
    #[test]
    fn texts_that_are_nearly_right_survive_and_are_walked(
        changes in prop::collection::vec((0usize..28, any::<u64>(), 0u32..64), 0..6),
    ) {
        let mut words: Vec<String> = TEXT.split_inclusive(['\t', '\n', ' ']).map(String::from).collect();
        for (place, value, shift) in changes {
            let place = place % words.len();
            let end = words[place].pop().unwrap_or(' ');
            words[place] = format!("{:#x}{end}", value >> shift);
        }
        let file = read(words.concat(), None);
        if let Some(found) = file.as_ref().ok().and_then(|file| file.tables().ok()) {
            survey(&found, Limits::default());
            for iova in [0, 0x8d80_0000, u64::MAX] {
                prop_assert!(explain(&found, iova).steps.len() <= 5);
            }
        }
    }
}
