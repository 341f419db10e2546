// The interface to etcd v3 as a store. A build without it has no_etcd.cc.
#pragma once

#include <memory>
#include <string_view>

#include "tessera/store.h"

namespace tessera::store {

// Throws kUnimplemented in a build without etcd.
std::unique_ptr<Store> open_etcd(std::string_view url, const StoreOptions& options);

}  // namespace tessera::store
