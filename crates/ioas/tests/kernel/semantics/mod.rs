//! The semantics of mapping on models: see [`table`].

mod models;
mod table;

use crate::plain_kernel::{Plain, PlainIommufd, PlainType1};
use models::{Models, OwnTables, raw};
use table::{Answer, Column, Subject, rows};

fn kernel<const IOMMUFD: bool>(column: Column) {
    let mut shown = 0;
    for row in rows::<Plain<IOMMUFD>, OwnTables>() {
        let (Some(calls), Some(expected)) = (row.kernel, row.answer(column)) else {
            continue;
        };
        let answer = calls(&mut raw::<IOMMUFD>());
        assert_eq!(answer, expected, "{column:?}: {}", row.name);
        shown += 1;
    }
    assert!(shown > 20, "{shown}");
}

fn library<S: Subject>(column: Column, own: bool, new: impl Fn() -> S) {
    let mut shown = 0;
    for row in rows::<PlainType1, S>() {
        let expected = row.library_answer(column, own);
        let (Some(calls), Some(expected)) = (row.library, expected) else {
            continue;
        };
        let answer = calls(&mut new(), column.profile());
        assert_eq!(answer, expected, "{column:?}: {}", row.name);
        shown += 1;
    }
    assert!(shown > 20, "{shown}");
}

#[test]
fn a_container_answers_as_the_table_says() {
    kernel::<false>(Column::Type1);
}

#[test]
fn iommufd_answers_as_the_table_says() {
    kernel::<true>(Column::Iommufd);
}

#[test]
fn own_tables_behave_as_a_container() {
    library(Column::Type1, true, OwnTables::new);
}

#[test]
fn own_tables_behave_as_iommufd() {
    library(Column::Iommufd, true, OwnTables::new);
}

#[test]
fn the_back_end_over_a_container_behaves_as_one() {
    library(Column::Type1, false, Models::<PlainType1>::new);
}

#[test]
fn the_back_end_over_iommufd_behaves_as_iommufd() {
    library(Column::Iommufd, false, Models::<PlainIommufd>::new);
}

/// The rows as the table of the documents.
fn document() -> String {
    let mut document = String::from(
        "| operation | type 1 | compatibility layer | iommufd | this library |\n|---|---|---|---|---|\n",
    );
    let said = |answer: Option<Answer>| match answer {
        None => "–".to_owned(),
        Some(Ok(number)) => number.to_string(),
        Some(Err(errno)) => errno.to_string(),
    };
    for row in rows::<PlainType1, OwnTables>() {
        let columns = [Column::Type1, Column::Compatibility, Column::Iommufd];
        let [type1, compatibility, iommufd] = columns.map(|column| said(row.answer(column)));
        let mut library = match (row.library, row.everywhere) {
            (None, _) => said(None),
            (Some(_), None) => "=".to_owned(),
            (Some(_), everywhere) => said(everywhere),
        };
        if row.own.is_some() {
            library += &format!("; own tables {}", said(row.own));
        }
        let name = row.name;
        let line = format!("| {name} | {type1} | {compatibility} | {iommufd} | {library} |\n");
        document += &line;
    }
    document
}

#[test]
fn the_table_in_the_documents_has_these_rows() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/semantics.md");
    let found = std::fs::read_to_string(path).unwrap();
    let table = document();
    assert!(
        found.contains(&table),
        "docs/semantics.md needs this table:\n\n{table}"
    );
}
