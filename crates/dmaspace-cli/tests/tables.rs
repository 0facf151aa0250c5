//! `dmaspace tables` on images and dumps that are made here.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use iopt::TableOps as _;
use std::convert::Infallible;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

use common::{dmaspace, refused, report, run, text};
use dmaspace::iopt::format::VtdSs;
use dmaspace::iopt::{HeapArena, Prot, Table, TableMemory};
use dmaspace::runs::{PageSizes, Span};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Where the tables lie.
const BASE: u64 = 16 * MIB;

/// Files with tables.
struct Files {
    directory: TempDir,
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// An image of VT-d's second stage with leaves of up to `most` bytes, and the memory of its tables.
    fn image(&self, name: &str, most: u64, maps: &[(u64, u64, u64, Prot)]) -> PathBuf {
        let memory = HeapArena::<AtomicU64, 12>::with_tables_at(64, BASE).unwrap();
        let sizes = PageSizes::from_bits(u64::MAX).up_to(most);
        let sizes = sizes.and(PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30));
        let mut table = Table::with_page_sizes(VtdSs::new(4).unwrap(), &memory, sizes).unwrap();
        for (iova, pa, bytes, prot) in maps {
            table.map(*iova, &[Span::new(*pa, *bytes)], *prot).unwrap();
        }
        let mut image = Vec::new();
        let mut sink = |bytes: &[u8]| {
            image.extend_from_slice(bytes);
            Ok::<_, Infallible>(())
        };
        table.write_image(&mut sink).unwrap();
        let dump: Vec<u8> = (BASE..BASE + 64 * 4096)
            .step_by(8)
            .flat_map(|address| {
                use dmaspace::iopt::walk::WalkMemory as _;
                memory.read_u64(address).unwrap().to_le_bytes()
            })
            .collect();
        let root = table.root().address;
        let (gather, memory) = table.tear_down();
        memory.reclaim(gather.never_walked().into_tables());
        let path = self.path(name);
        fs::write(&path, image).unwrap();
        fs::write(path.with_extension("dump"), dump).unwrap();
        fs::write(path.with_extension("root"), format!("{root:#x}")).unwrap();
        path
    }
}

/// 1 GiB, 64 MiB in small pages would be 32 tables, a read-only page, and a hole.
fn sample(files: &Files) -> PathBuf {
    let maps = [
        (GIB, 4 * GIB, GIB, Prot::RW),
        (2 * GIB, 6 * GIB, 4 * MIB, Prot::RW),
        (2 * GIB + 4 * MIB, 8 * GIB, 12 << 10, Prot::READ),
    ];
    files.image("sample.img", GIB, &maps)
}

fn stdout(arguments: &[&str], expected: i32) -> String {
    let (stdout, stderr, status) = run(dmaspace(arguments));
    assert_eq!((stderr.as_str(), status), ("", Some(expected)), "{stdout}");
    stdout
}

#[test]
fn an_image_is_written_of_given_runs() {
    let files = Files::new();
    let (expected, image) = (sample(&files), files.path("tables.img"));
    let maps = "--map 1G:1G:4G --map 0x80000000:4M:6G:rw --map 0x80400000:12K:0x200000000:r";
    let mut arguments = vec!["tables", "image", text(&image)];
    arguments.extend(maps.split(' '));
    let said = stdout(&arguments, 0);
    assert!(
        said.contains("  tables      4, vtd-ss, 4 levels\n"),
        "{said}"
    );
    assert_eq!(fs::read(&image).unwrap(), fs::read(expected).unwrap());

    let twice = [&arguments[..], &["--map", "0x80001000:4K:0"]].concat();
    let refusal = refused(dmaspace(&twice));
    assert!(
        refusal.starts_with("0x80001000 + 4 KiB cannot be mapped: 0x80001000+0x1000 overlaps"),
        "{refusal}"
    );
    let narrow = [&arguments[..], &["--format", "dart1"]].concat();
    let refusal = refused(dmaspace(&narrow));
    assert!(refusal.contains(" cannot be mapped: "), "{refusal}");
}

#[test]
fn an_image_is_written_of_the_pages_of_a_process() {
    let files = Files::new();
    let image = files.path("process.img");
    let mut memory = vec![0u8; 1 << 20];
    memory.fill(1);
    let page = (memory.as_ptr() as u64 + 8192) & !4095;
    let pid = std::process::id();
    let mut frame = None;
    let pages = hostmem::ProcessPages::open(pid).unwrap();
    let range = Span::new(page, 4096);
    pages
        .for_each(range, 2 << 20, |run| frame = run.pa)
        .unwrap();
    let pid = pid.to_string();
    let arguments = ["tables", "image", text(&image), "--pid", &pid];
    let Some(frame) = frame else {
        let refusal = refused(dmaspace(&arguments));
        assert!(refusal.contains("CAP_SYS_ADMIN"), "{refusal}");
        return;
    };
    stdout(&arguments, 0);
    let iova = format!("{:#x}", page + 5);
    let walk = report(dmaspace(&["tables", "walk", text(&image), &iova, "--json"]));
    assert_eq!(walk["write"]["pa"], format!("{:#x}", frame + 5), "{walk}");
    stdout(&["tables", "check", text(&image)], 0);
    assert_eq!(memory[8192], 1);
}

#[test]
fn a_dump_lists_everything() {
    let files = Files::new();
    let image = sample(&files);
    let found = stdout(&["tables", "dump", text(&image)], 0);
    assert_eq!(found, DUMP.trim_start_matches('\n'), "\n{found}");
    // Pages of 4 KiB only: 512 tables of them in one line, all of them in the way.
    let maps = [(GIB, 4 * GIB, 32 * MIB, Prot::RW)];
    let small = files.image("small.img", 4096, &maps);
    let found = stdout(&["tables", "dump", text(&small)], 0);
    for line in [
        "  mergeable   64 KiB (84.2 %): 16 tables whose leaves could be one larger leaf",
        "      [0..15] 0x40000000 + 32 MiB: 16 tables from 0x1003000 on, level 0",
        "        [0..8191] 0x40000000 + 32 MiB → 0x100000000  8,192 × 4 KiB  rw-",
    ] {
        assert!(found.contains(line), "{found}");
    }
    let one = stdout(&["tables", "dump", text(&small), "--lines", "1"], 0);
    assert!(one.contains("… 3 lines more (--lines 4)"), "{one}");
}

#[test]
fn a_walk_is_explained_field_by_field_also_out_of_a_dump_of_memory() {
    let files = Files::new();
    let image = sample(&files);
    let found = stdout(&["tables", "walk", text(&image), "0x80401234"], 0);
    assert_eq!(found, WALK.trim_start_matches('\n'), "\n{found}");
    let (dump, root) = (image.with_extension("dump"), image.with_extension("root"));
    let root = fs::read_to_string(root).unwrap();
    let options = [
        "--format",
        "vtd-ss",
        "--root",
        &root,
        "--offset",
        "0x1000000",
    ];
    let same = [&["tables", "walk", text(&dump), "0x80401234"][..], &options].concat();
    assert_eq!(stdout(&same, 0), found);
    let json = [&same[..], &["--json"]].concat();
    let json = report(dmaspace(&json));
    assert_eq!(json["read"]["outcome"], "translated");
    assert_eq!(json["write"]["outcome"], "faults");
    assert_eq!(json["steps"].as_array().unwrap().len(), 4);
}

#[test]
fn a_check_finds_what_is_wrong_and_says_it_in_its_status() {
    let files = Files::new();
    let image = sample(&files);
    let found = stdout(&["tables", "check", text(&image)], 0);
    assert!(
        found.ends_with("\nfindings\n  check       ✓ nothing is wrong\n"),
        "{found}"
    );
    let dump = image.with_extension("dump");
    let root = fs::read_to_string(image.with_extension("root")).unwrap();
    let options = [
        "--format",
        "vtd-ss",
        "--root",
        &root,
        "--offset",
        "0x1000000",
    ];
    let mut bytes = fs::read(&dump).unwrap();
    // Bit 62 of every word that is not 0: all links and leaves.
    for word in bytes.chunks_exact_mut(8).filter(|word| word[0] != 0) {
        word[7] |= 0x40;
    }
    fs::write(&dump, bytes).unwrap();
    let broken = stdout(
        &[&["tables", "check", text(&dump)][..], &options].concat(),
        1,
    );
    assert!(
        broken.contains("  0x0         ✗ entry 0 of the table at 0x1000000"),
        "{broken}"
    );
    assert!(
        broken.contains("reserved bits 0x4000000000000000"),
        "{broken}"
    );
    // A damaged image is an answer as well.
    let mut bytes = fs::read(&image).unwrap();
    bytes[90] ^= 1;
    fs::write(&image, bytes).unwrap();
    let (_, stderr, status) = run(dmaspace(&["tables", "check", text(&image)]));
    assert_eq!(status, Some(1));
    assert!(stderr.contains("checksum"), "{stderr}");
}

/// Changes bytes of an image and makes its checksum right again.
fn forge(image: &[u8], at: usize, lie: &[u8]) -> Vec<u8> {
    let mut bytes = image[..image.len() - 4].to_vec();
    bytes[at..at + lie.len()].copy_from_slice(lie);
    // CRC-32C, bit by bit.
    let mut crc = u32::MAX;
    for byte in &bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    bytes.extend_from_slice(&(!crc).to_le_bytes());
    bytes
}

#[test]
fn an_image_whose_header_lies_is_damaged_to_the_check() {
    let files = Files::new();
    let image = sample(&files);
    let whole = fs::read(&image).unwrap();
    fs::write(&image, forge(&whole, 34, &[whole[34]])).unwrap();
    stdout(&["tables", "check", text(&image)], 0);
    let sizes = |bits: u64| bits.to_le_bytes();
    let lies: [(&str, usize, &[u8]); 9] = [
        ("output bits", 34, &[0]),
        ("output bits", 34, &[255]),
        ("input bits", 35, &[0]),
        ("input bits", 35, &[255]),
        ("upper input bits", 36, &[9]),
        ("bit of encryption", 37, &[63]),
        ("page sizes", 40, &sizes(0)),
        ("page sizes", 40, &sizes(3)),
        ("page sizes", 40, &sizes(u64::MAX)),
    ];
    for (what, at, lie) in lies {
        fs::write(&image, forge(&whole, at, lie)).unwrap();
        let (_, stderr, status) = run(dmaspace(&["tables", "check", text(&image)]));
        assert_eq!(status, Some(1), "{what} {lie:x?}: {stderr}");
        assert!(stderr.contains(what), "{what} {lie:x?}: {stderr}");
    }
}

#[test]
fn differences_are_listed() {
    let files = Files::new();
    let before = sample(&files);
    let maps = [
        (GIB, 4 * GIB, GIB, Prot::RW),
        (2 * GIB, 7 * GIB, 2 * MIB, Prot::RW),
        (2 * GIB + 4 * MIB, 8 * GIB, 12 << 10, Prot::RW),
        (3 * GIB, 9 * GIB, 4096, Prot::RW),
    ];
    let after = files.image("after.img", GIB, &maps);
    let found = stdout(&["tables", "diff", text(&before), text(&after)], 1);
    assert_eq!(found, DIFF.trim_start_matches('\n'), "\n{found}");
    let same = stdout(&["tables", "diff", text(&before), text(&before)], 0);
    assert!(!same.contains("changes"), "{same}");
}

#[test]
fn a_picture_shows_the_leaves() {
    let files = Files::new();
    let image = sample(&files);
    let svg = files.path("picture.svg");
    let arguments = ["tables", "picture", text(&image), "--svg", text(&svg)];
    assert_eq!(stdout(&arguments, 0), "");
    let drawn = fs::read_to_string(&svg).unwrap();
    assert!(
        drawn.contains("<title>1.00 GiB in vtd-ss tables: 3 runs, 6 leaves</title>"),
        "{drawn}"
    );
    for words in ["3 × 4 KiB, 2 × 2 MiB, 1 × 1 GiB", "leaf of 1 GiB"] {
        assert!(drawn.contains(words), "{words}: {drawn}");
    }
}

#[test]
fn a_picture_of_several_tables_names_each() {
    let files = Files::new();
    let before = files.image("before.img", GIB, &[(GIB, 4 * GIB, 2 * MIB, Prot::RW)]);
    let after = files.image("after.img", GIB, &[(GIB, 4 * GIB, MIB, Prot::RW)]);
    let svg = files.path("picture.svg");
    let files = ["tables", "picture", text(&before), text(&after)];
    let arguments = [&files[..], &["--svg", text(&svg)]].concat();
    assert_eq!(stdout(&arguments, 0), "");
    let drawn = fs::read_to_string(&svg).unwrap();
    for words in [
        "<title>before → after</title>",
        ">before, 3 tables: 1 × 2 MiB<",
        ">after, 4 tables: 256 × 4 KiB<",
    ] {
        assert!(drawn.contains(words), "{words}: {drawn}");
    }
}

#[test]
fn what_cannot_be_had_is_refused_in_a_sentence() {
    let files = Files::new();
    let image = sample(&files);
    let dump = image.with_extension("dump");
    let of = |arguments: &[&str]| {
        let words = [&["tables", "dump"], arguments].concat();
        refused(dmaspace(&words))
    };
    assert!(of(&["/nowhere"]).starts_with("cannot read /nowhere: No such file"));
    assert!(
        of(&[text(&dump)]).contains("is no image of tables: a dump of memory requires --format")
    );
    let vtd = ["--format", "vtd-ss", "--root"];
    let outside = of(&[
        &[text(&dump)][..],
        &vtd,
        &["0x1000"],
        &["--offset", "0x1000000"],
    ]
    .concat());
    assert!(outside.ends_with("holds the addresses from 0x1000000 on, and not the root at 0x1000"));
    // Every page of it is a table that leads to more.
    let endless = of(&[&["/dev/urandom"][..], &vtd, &["0"]].concat());
    assert!(
        endless.starts_with(
            "/dev/urandom is a device without a size, and more than 67108864 bytes of tables"
        ),
        "{endless}"
    );
    let levels = of(&[&[text(&dump)][..], &vtd, &["0", "--levels", "7"]].concat());
    assert_eq!(levels, "vtd-ss has no tables of 7 levels for 64 input bits");
}

#[test]
fn the_names_that_help_has_for_jq_are_in_the_reports() {
    let files = Files::new();
    let image = sample(&files);
    for (command, operand) in [
        ("dump", None),
        ("walk", Some("0x80401234")),
        ("check", None),
        ("diff", Some(text(&image))),
    ] {
        let help = stdout(&["tables", command, "--help"], 0);
        let filters: Vec<_> = help.split("| jq .").skip(1).collect();
        let [filter] = filters.as_slice() else {
            panic!("not one filter: {help}");
        };
        let names = filter.lines().next().unwrap().replace('.', "/");
        let words = ["tables", command, text(&image)].into_iter();
        let words: Vec<_> = words.chain(operand).chain(["--json"]).collect();
        let found = report(dmaspace(&words));
        assert!(
            found.pointer(&format!("/{names}")).is_some(),
            "{command}: {names}"
        );
    }
}

#[test]
fn what_is_of_a_dump_is_not_taken_for_a_device() {
    for (option, value) in [
        ("--root", Some("0x1000")),
        ("--offset", Some("0x1000")),
        ("--levels", Some("3")),
        ("--input-bits", Some("39")),
        ("--upper", None),
        ("--encryption-bit", Some("51")),
    ] {
        let words = [
            "tables",
            "dump",
            "/nowhere",
            "--device",
            "0000:00:05.0",
            option,
        ];
        let (_, stderr, status) = run(dmaspace(&[&words[..], value.as_slice()].concat()));
        assert_eq!(status, Some(2), "{option}: {stderr}");
        assert!(stderr.contains("cannot be used with"), "{option}: {stderr}");
    }
}

/// Two devices, as the kernel shows them in debugfs.
const KERNEL: &str = "\
Device 0000:00:05.0 @0x1000000
IOVA_PFN         \tPML5E             \tPML4E             \tPDPE              \tPDE               \tPTE
0x0000000080401 |\t0x0000000000000000\t0x0000000001001003\t0x0000000001002003\t0x0000000001003003\t0x0000000200001001

Device 0000:00:06.0 @0x2000000
IOVA_PFN         \tPML5E             \tPML4E             \tPDPE              \tPDE               \tPTE

";

#[test]
fn what_a_kernel_shows_is_read_as_any_other_file() {
    let files = Files::new();
    let file = files.path("domain_translation_struct");
    fs::write(&file, KERNEL).unwrap();
    let of = ["tables", "walk", text(&file), "0x80401234"];
    let device = ["--device", "0000:00:05.0"];
    let found = stdout(&[&of[..], &device].concat(), 0);
    // The same way as out of an image, but for the tables above.
    let (_, last) = WALK.split_once("level 0").unwrap();
    assert!(found.ends_with(last), "{found}");
    let empty = ["tables", "dump", text(&file), "--device", "0000:00:06.0"];
    assert!(stdout(&empty, 0).contains("  mapped      0 B"), "{found}");

    let refusal = refused(dmaspace(&of));
    let several = "it has the tables of 0000:00:05.0, 0000:00:06.0";
    assert!(refusal.ends_with(several), "{refusal}");
    let image = sample(&files);
    let of_image = [&["tables", "dump", text(&image)][..], &device].concat();
    let refusal = refused(dmaspace(&of_image));
    assert!(
        refusal.ends_with("is no kernel's text of tables, of which --device chooses"),
        "{refusal}"
    );
    // Damage is an answer.
    fs::write(&file, KERNEL.replace('|', "!")).unwrap();
    let (_, stderr, status) = run(dmaspace(&["tables", "check", text(&file)]));
    assert_eq!(status, Some(1));
    assert!(
        stderr.ends_with("line 3 is no row of a leaf and its entries\n"),
        "{stderr}"
    );
}

const DUMP: &str = r"
tables
  format      vtd-ss
  root        0x1000000, 4 levels, the 48-bit address space
  mapped      1.00 GiB in 3 runs
  leaves      1 × 1 GiB = 1 GiB
              2 × 2 MiB = 4 MiB
              3 × 4 KiB = 12 KiB

levels
  level 3     1 table of 4 KiB, 1 of 512 entries present (0.2 %)
  level 2     1 table of 4 KiB, 2 of 512 entries present (0.4 %)
  level 1     1 table of 4 KiB, 3 of 512 entries present (0.6 %)
  level 0     1 table of 4 KiB, 3 of 512 entries present (0.6 %)

table memory
  all         16 KiB
  wasted      nothing

tree
  [0] 0x0 + 512 GiB: table at 0x1001000, level 2
    [1] 0x40000000 + 1 GiB → 0x100000000  1 × 1 GiB  rw-
    [2] 0x80000000 + 1 GiB: table at 0x1002000, level 1
      [0..1] 0x80000000 + 4 MiB → 0x180000000  2 × 2 MiB  rw-
      [2] 0x80400000 + 2 MiB: table at 0x1003000, level 0
        [0..2] 0x80400000 + 12 KiB → 0x200000000  3 × 4 KiB  r--
";

const WALK: &str = r"
level 3: entry 0 of the table at 0x1000000
  entry       0x0000000001001003 at 0x1000000
  source      VT-d 5.0, 9.8 and 3.7
  0           R              0x1     reading is allowed
  1           W              0x1     writing is allowed
  2           X              0x0     instruction fetches, where supported
  8           A              0x0     not accessed
  51:12       address        0x1001  0x1001000

level 2: entry 2 of the table at 0x1001000
  entry       0x0000000001002003 at 0x1001010
  source      VT-d 5.0, 9.8 and 3.7
  0           R              0x1     reading is allowed
  1           W              0x1     writing is allowed
  2           X              0x0     instruction fetches, where supported
  8           A              0x0     not accessed
  51:12       address        0x1002  0x1002000

level 1: entry 2 of the table at 0x1002000
  entry       0x0000000001003003 at 0x1002010
  source      VT-d 5.0, 9.8 and 3.7
  0           R              0x1     reading is allowed
  1           W              0x1     writing is allowed
  2           X              0x0     instruction fetches, where supported
  8           A              0x0     not accessed
  51:12       address        0x1003  0x1003000

level 0: entry 1 of the table at 0x1003000
  entry       0x0000000200001001 at 0x1003008
  source      VT-d 5.0, 9.8 and 3.7
  0           R              0x1       reading is allowed
  1           W              0x0       writing is not allowed
  2           X              0x0       instruction fetches, where supported
  5:3         EMT            0x0       memory type, where the unit uses it
  6           IPAT           0x0       memory type, where the unit uses it
  8           A              0x0       not accessed
  9           D              0x0       not written to
  11          SNP            0x0       snooped as the device asks
  51:12       address        0x200001  0x200001000

0x80401234
  read        ✓ goes to 0x200001234: 0x80401000 → 0x200001000, 4 KiB, r--
  write       ✗ faults: write of 0x80401234: the entry 0x200001001 of the table
              at 0x1003000 (level 0) leaves only r--; the unit reports fault
              reason 0x5 (legacy mode) (VT-d 5.0, section 7.1.3)
";

const DIFF: &str = r"
difference
  formats     vtd-ss, vtd-ss
  same        1 GiB
  removed     2 MiB
  added       4 KiB
  changed     2.01 MiB

leaves before
  leaves      1 × 1 GiB = 1 GiB
              2 × 2 MiB = 4 MiB
              3 × 4 KiB = 12 KiB

leaves after
  leaves      1 × 1 GiB = 1 GiB
              1 × 2 MiB = 2 MiB
              4 × 4 KiB = 16 KiB

changes
  0x80000000 + 2 MiB: 0x180000000 rw- → 0x1c0000000 rw-
  0x80200000 + 2 MiB: 0x180200000 rw- → nothing
  0x80400000 + 12 KiB: 0x200000000 r-- → 0x200000000 rw-
  0xc0000000 + 4 KiB: nothing → 0x240000000 rw-
";
