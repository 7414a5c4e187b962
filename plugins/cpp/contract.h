// The operators as plugins/contract.py declares them, and the rules of plugins/rules.py: sizes, dtypes, attributes, each fault a sentence.
//
// Knows neither TensorRT nor CUDA. A size is a number, or UNKNOWN where it is chosen at run time. Shape letters as in plugins/contract.py,
// one character each: H stands for Hq. tests/plugins/test_cpp.py compares names, letters and sentences with the Python ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace dspark {

constexpr const char* NAMESPACE = "dspark";
constexpr const char* VERSION = "1";

struct Attributes {
    float scale = 0.0f;
    int64_t window = 0, heads = 0, kv_heads = 0, head_dim = 0;
};

// An attribute is a float or an integer: one of the two is set.
struct Field {
    const char* name;
    float Attributes::* real;
    int64_t Attributes::* whole;
};

struct Tensor {
    const char* name;
    const char* letters;
    bool is_int64;
};

struct Operator {
    const char* name;
    std::vector<Tensor> inputs;
    Tensor output;
    std::vector<Field> fields;
    int aliased_input;  // whose memory the output takes, -1 for none
};

inline const Operator RING_WRITE{
    "RingWrite",
    {{"ring", "BGRD", false}, {"rows", "BGND", false}, {"start", "B", true}},
    {"updated", "BGRD", false},
    {},
    0,
};

inline const Operator BLOCK_ATTENTION{
    "BlockAttention",
    {
        {"query", "BHTD", false},
        {"ring_key", "BGRD", false},
        {"ring_value", "BGRD", false},
        {"block_key", "BGTD", false},
        {"block_value", "BGTD", false},
        {"total", "B", true},
        {"first", "B", true},
    },
    {"attended", "BHTD", false},
    {
        {"scale", &Attributes::scale, nullptr},
        {"window", nullptr, &Attributes::window},
        {"heads", nullptr, &Attributes::heads},
        {"kv_heads", nullptr, &Attributes::kv_heads},
        {"head_dim", nullptr, &Attributes::head_dim},
    },
    -1,
};

constexpr int64_t UNKNOWN = -1;
using Sizes = std::map<char, int64_t>;
using Shapes = std::vector<std::vector<int64_t>>;

inline std::string letter_name(char letter) { return letter == 'H' ? "Hq" : std::string(1, letter); }

inline std::string joined(const std::vector<std::string>& parts, const char* between) {
    std::string text;
    for (const std::string& part : parts) text += (text.empty() ? "" : between) + part;
    return text;
}

inline std::string declared(const char* letters) {
    std::vector<std::string> names;
    for (const char* letter = letters; *letter != '\0'; ++letter) names.push_back(letter_name(*letter));
    return joined(names, ",");
}

inline bool known(const Sizes& sizes, char letter) { return sizes.count(letter) != 0 && sizes.at(letter) != UNKNOWN; }

// Sets the size of each letter from the shapes of the inputs in order; returns all faults, an empty text where there are none.
inline std::string find_sizes(const Operator& op, const Shapes& shapes, Sizes& sizes) {
    std::vector<std::string> faults;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
        const std::string name = op.inputs[i].name, letters = op.inputs[i].letters;
        if (shapes[i].size() != letters.size()) {
            faults.push_back(name + " has " + std::to_string(shapes[i].size()) + " dimensions, expected " +
                             std::to_string(letters.size()) + " (" + declared(op.inputs[i].letters) + ")");
            continue;
        }
        for (size_t axis = 0; axis < letters.size(); ++axis) {
            const int64_t size = shapes[i][axis], before = known(sizes, letters[axis]) ? sizes[letters[axis]] : UNKNOWN;
            if (before != UNKNOWN && size != UNKNOWN && before != size) {
                faults.push_back(name + " has " + letter_name(letters[axis]) + " = " + std::to_string(size) + ", expected " +
                                 std::to_string(before) + " as in the inputs before it");
            }
            sizes[letters[axis]] = before == UNKNOWN ? size : before;
        }
    }
    if (faults.empty() && known(sizes, 'N') && known(sizes, 'R') && sizes['N'] > sizes['R']) {
        faults.push_back(std::to_string(sizes['N']) + " rows do not fit a ring of " + std::to_string(sizes['R']) + ": N must not exceed R");
    }
    if (faults.empty() && known(sizes, 'H') && known(sizes, 'G') && sizes['H'] % sizes['G'] != 0) {
        faults.push_back(std::to_string(sizes['H']) + " query heads are no multiple of " + std::to_string(sizes['G']) + " key/value heads");
    }
    return faults.empty() ? "" : op.name + (": " + joined(faults, "; "));
}

// The head attributes repeat sizes: returns where they differ.
inline std::string find_disagreement(const Operator& op, const Attributes& attributes, const Sizes& sizes) {
    std::vector<std::string> faults;
    for (const Field& field : op.fields) {
        const std::string name = field.name;
        const char letter = name == "heads" ? 'H' : name == "kv_heads" ? 'G' : name == "head_dim" ? 'D' : '\0';
        if (letter == '\0' || !known(sizes, letter) || sizes.at(letter) == attributes.*field.whole) continue;
        faults.push_back("attribute " + name + " is " + std::to_string(attributes.*field.whole) + ", the inputs have " +
                         letter_name(letter) + " = " + std::to_string(sizes.at(letter)));
    }
    return faults.empty() ? "" : op.name + (": " + joined(faults, "; "));
}

// The input and the axis that give the output a letter.
inline std::pair<int, int> source_of(const Operator& op, char letter) {
    for (size_t i = 0; i < op.inputs.size(); ++i) {
        const size_t axis = std::string(op.inputs[i].letters).find(letter);
        if (axis != std::string::npos) return {static_cast<int>(i), static_cast<int>(axis)};
    }
    return {-1, -1};
}

}  // namespace dspark
