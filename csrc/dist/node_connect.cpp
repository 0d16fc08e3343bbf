// How a node reaches the other ranks.
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "access.h"
#include "exchange.h"
#include "node.h"
#include "transport/direct_transport.h"
#include "transport/zeromq_transport.h"

namespace torchkv::dist {
namespace {

// "<host>\n<ipc>\n<tcp>\n<pid>\n<started>"
std::string encode_address(const PeerAddress& address) {
  return c10::str(
      address.host,
      '\n',
      address.ipc,
      '\n',
      address.tcp,
      '\n',
      address.pid,
      '\n',
      address.started);
}

PeerAddress decode_address(const std::string& text, int32_t rank) {
  std::vector<std::string> lines(1);
  for (const char c : text) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  TORCH_CHECK(
      lines.size() == 5,
      "create: the rendezvous holds a wrong address of rank ",
      rank);
  return {
      lines[0],
      lines[1],
      lines[2],
      std::strtoll(lines[3].c_str(), nullptr, 10),
      std::strtoull(lines[4].c_str(), nullptr, 10)};
}

} // namespace

// Without sockets, and without ZeroMQ's library.
std::unique_ptr<Transport> Node::make_direct() {
  incarnation_ = rendezvous_->add(c10::str(prefix_, "incarnation/", rank_), 1);
  return std::make_unique<DirectTransport>(rank_);
}

std::unique_ptr<Transport> Node::make_zeromq(
    const Token& token,
    const StoreOptions& options,
    double timeout) {
  ZeromqConfig config;
  config.rank = rank_;
  config.token = token;
  config.limits.num_workers = num_ranks_;
  config.limits.num_servers = num_ranks_;
  Exchange exchange(rendezvous_, prefix_, rank_, num_ranks_, timeout);
  set_access(config, options, exchange, reachable_host(*rendezvous_));
  memory_ = config.memory;
  shares_memory_ = memory_ != nullptr && config.security == Security::kIpc;
  auto transport = std::make_unique<ZeromqTransport>(std::move(config));
  const auto addresses =
      exchange.all("address", encode_address(transport->address()));
  // Only now: a create that has failed may be repeated by the same process.
  incarnation_ = rendezvous_->add(c10::str(prefix_, "incarnation/", rank_), 1);
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) {
      const auto& text = addresses[static_cast<size_t>(rank)];
      transport->connect(rank, decode_address(text, rank));
    }
  }
  return transport;
}

} // namespace torchkv::dist
