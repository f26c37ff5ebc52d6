package validation

import (
	"fmt"
	"sync"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// CheckEncoded returns nil when an encoded message holds no more elements in its lists and maps than its constraints allow, else
// INVALID_ARGUMENT naming the first field that does. It allocates next to nothing, whatever the message holds: two bytes on the
// wire can stand for a hundred in memory, so what has too many elements must not be decoded. What cannot be read passes; decoding
// it fails. The other constraints are [Validator.Check]'s.
func (v *Validator) CheckEncoded(message protoreflect.MessageDescriptor, encoded []byte) error {
	exceeded := v.counts.of(message).check(encoded, 0)
	if exceeded == nil {
		return nil
	}
	return agenterrors.InvalidArgument(*exceeded)
}

// counts knows how many elements each message's fields may have.
type counts struct {
	mu       sync.Mutex
	messages map[protoreflect.FullName]messageCounts
}

// messageCounts are the fields of one message that are counted, or that hold messages, by number.
type messageCounts map[protowire.Number]fieldCounts

type fieldCounts struct {
	name string
	list bool
	// most is how many elements the field may have; 0 for any number.
	most    uint64
	element messageCounts // nil unless the elements are messages
}

// maxDepth is how deep messages are looked into. No request nests that deep.
const maxDepth = 16

func (c *counts) of(message protoreflect.MessageDescriptor) messageCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.learn(message)
}

// learn is called with the lock held.
func (c *counts) learn(message protoreflect.MessageDescriptor) messageCounts {
	if known, ok := c.messages[message.FullName()]; ok {
		return known
	}
	fields := messageCounts{}
	c.messages[message.FullName()] = fields // before its fields, as a message may hold its own kind
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		counted := fieldCounts{name: string(field.Name()), list: field.IsList(), most: mostOf(field)}
		if field.Message() != nil && !field.IsMap() {
			counted.element = c.learn(field.Message())
		}
		if counted.most > 0 || counted.element != nil {
			fields[field.Number()] = counted
		}
	}
	return fields
}

// mostOf returns how many elements a list or map may have, 0 if its constraints do not say.
func mostOf(field protoreflect.FieldDescriptor) uint64 {
	rules, err := protovalidate.ResolveFieldRules(field)
	switch {
	case err != nil || rules == nil:
		return 0
	case field.IsMap():
		return rules.GetMap().GetMaxPairs()
	case field.IsList():
		return rules.GetRepeated().GetMaxItems()
	}
	return 0
}

// check returns the first field that has too many elements, nil if none has.
func (m messageCounts) check(encoded []byte, depth int) *agenterrors.FieldViolation {
	if depth > maxDepth {
		return nil
	}
	var seen map[protowire.Number]uint64
	for len(encoded) > 0 {
		number, kind, length := protowire.ConsumeTag(encoded)
		if length < 0 {
			return nil
		}
		encoded = encoded[length:]
		length = protowire.ConsumeFieldValue(number, kind, encoded)
		if length < 0 {
			return nil
		}
		field, counted := m[number]
		if counted && kind == protowire.BytesType {
			if exceeded := field.check(encoded[:length], seen[number], depth); exceeded != nil {
				return exceeded
			}
			if seen == nil {
				seen = map[protowire.Number]uint64{}
			}
			seen[number]++
		}
		encoded = encoded[length:]
	}
	return nil
}

// check looks at one value of the field, with its length in front, before which there were others.
func (f fieldCounts) check(value []byte, others uint64, depth int) *agenterrors.FieldViolation {
	if f.most > 0 && others >= f.most {
		return &agenterrors.FieldViolation{Field: f.name, Description: fmt.Sprintf("must have at most %d elements", f.most)}
	}
	if f.element == nil {
		return nil
	}
	content, length := protowire.ConsumeBytes(value)
	if length < 0 {
		return nil
	}
	exceeded := f.element.check(content, depth+1)
	if exceeded == nil {
		return nil
	}
	if f.list {
		exceeded.Field = fmt.Sprintf("%s[%d].%s", f.name, others, exceeded.Field)
	} else {
		exceeded.Field = f.name + "." + exceeded.Field
	}
	return exceeded
}
