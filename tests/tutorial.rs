//! The kernels of docs/tutorial, on emulated clusters over real proxies.

mod common;

use common::{bulk, fused};

#[test]
fn a_product_is_read_where_it_arrives() {
    fused::product(&fused::put_config());
}

#[test]
fn every_token_reaches_its_expert() {
    fused::tokens(&fused::put_config());
}

#[test]
fn tiles_go_by_bulk_copies() {
    bulk::tiles(&fused::put_config());
}
