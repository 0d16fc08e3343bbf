// Rounds of several slices.
#include <algorithm>

#include "app.h"
#include "simulation.h"
#include "update.h"

namespace torchkv::dist::simulation {

namespace {

// Of several slices.
struct ListValue final : Value {
  explicit ListValue(std::vector<ValuePtr> values) : parts(std::move(values)) {
    Elements all;
    for (const ValuePtr& part : parts) {
      const Elements elements = gather(part->pieces);
      all.insert(all.end(), elements.begin(), elements.end());
    }
    pieces.push_back(make_blob(std::move(all)));
  }
  ValuePtr part(size_t i) const override {
    return parts.at(i);
  }

  std::vector<ValuePtr> parts;
};

// A round of one slice of the list.
RoundPtr part_of(const Round& round, size_t i) {
  const RoundPart& of = round.parts->at(i);
  auto part = std::make_shared<Round>(round);
  part->slice = of.slice;
  part->spec = of.spec;
  part->num_elements = of.num_elements;
  part->parts = nullptr;
  part->source = round.source->part(i);
  for (Push& push : part->pushes) {
    push.pieces = {push.pieces.at(0).slice(
        static_cast<size_t>(of.begin) * sizeof(Element),
        static_cast<size_t>(of.num_elements) * sizeof(Element))};
  }
  return part;
}

} // namespace

void Simulation::apply_list(
    Process& process,
    Node& node,
    const RoundPtr& round) {
  ++statistics_[Count::kLists];
  const auto parts = std::make_shared<std::vector<RoundPtr>>();
  const auto updates = std::make_shared<std::vector<Update>>();
  for (size_t i = 0; i < round->parts->size(); ++i) {
    parts->push_back(part_of(*round, i));
    updates->emplace_back(parts->back(), nullptr);
    updates->back().begin();
  }
  heavy(
      process,
      node,
      plan_.work,
      [parts, updates](int half) {
        for (size_t i = 0; i < parts->size(); ++i) {
          Pushed pushed;
          for (const Push& push : parts->at(i)->pushes) {
            pushed.push_back(push.pieces);
          }
          updates->at(i).work(half, pushed);
        }
      },
      [this, &node, round, parts, updates] {
        std::vector<ValuePtr> values;
        std::vector<std::optional<std::string>> errors;
        for (size_t i = 0; i < parts->size(); ++i) {
          values.push_back(parts->at(i)->result);
          errors.push_back(updates->at(i).error());
          note_applied(node, *parts->at(i), errors.back().has_value());
        }
        round->result = std::make_shared<ListValue>(std::move(values));
        if (std::any_of(errors.begin(), errors.end(), [](const auto& error) {
              return error.has_value();
            })) {
          round->errors = std::move(errors);
        }
        node.server->on_applied(round, std::nullopt, now_);
      });
}

} // namespace torchkv::dist::simulation
