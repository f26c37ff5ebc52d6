package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

// prices makes a price list from flat rates.
type prices struct {
	currency string
	rates    pricing.FlatRates
	perGPU   float64
	of       pricing.FlatEntry
	meta     metav1.ObjectMeta
}

func newPrices() *cobra.Command {
	var p prices
	command := &cobra.Command{
		Use:   "prices [flags] MACHINE...",
		Short: "Print a price list from flat rates",
		Long: "Print a ConfigMap with a price list, for machines that have no cloud price. A MACHINE is an instance type with its resources, or " +
			"with its price per hour, month or year.",
		Example: "  capi-agent prices --per-cpu=0.004 --per-gib=0.0008 large=cpu=8,memory=32Gi,nvidia.com/gpu=1\n  capi-agent prices r760=900/month",
		RunE: func(command *cobra.Command, machines []string) error {
			if command.Flags().Changed("per-gpu") {
				p.rates.PerAccelerator = &p.perGPU
			}
			return p.print(machines, command.OutOrStdout())
		},
	}
	p.addFlags(command.Flags())
	return command
}

func (p *prices) addFlags(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.StringVar(&p.currency, "currency", "", "ISO 4217 code of the prices' currency.")
	for _, f := range []struct {
		target      *float64
		name, usage string
	}{
		{&p.rates.PerMachine, "per-machine", "Price per hour of a machine of any size."},
		{&p.rates.PerCPU, "per-cpu", "Price per hour of a CPU."},
		{&p.rates.PerGiB, "per-gib", "Price per hour of a GiB of memory."},
		{&p.rates.PerDiskGiB, "per-disk-gib", "Price per hour of a GiB of ephemeral-storage."},
		{&p.perGPU, "per-gpu", "Price per hour of one unit of any extended resource. Required if a machine has one."},
	} {
		flags.Float64Var(f.target, f.name, 0, f.usage)
	}
	flags.StringVar(&p.of.Cluster, "cluster", "",
		"Cluster that the prices apply to, as `namespace/name`; * matches any characters. If empty, they apply to all.")
	flags.StringVar(&p.of.Zone, "zone", "", "Zone that the prices apply to. If empty, they apply to all.")
	flags.StringVar(&p.of.Region, "region", "", "Region that the prices apply to. If empty, they apply to all.")
	flags.StringVar(&p.of.Infrastructure, "infrastructure", "",
		"Kind of the infrastructure objects that the prices apply to, for example Metal3Machine. If empty, they apply to all.")
	flags.StringVar(&p.of.CapacityType, "capacity-type", "", "Capacity type that the prices apply to. If empty, they apply to all.")
	flags.StringVar(&p.meta.Namespace, "namespace", "capi-agent-system", "Namespace of the ConfigMap.")
	flags.StringVar(&p.meta.Name, "name", "prices", "Name of the ConfigMap.")
}

// print writes the ConfigMap to out.
func (p *prices) print(machines []string, out io.Writer) error {
	list, err := pricing.FlatList(p.currency, p.rates, p.of, machines)
	if err != nil {
		return err
	}
	text, err := yaml.Marshal(corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: p.meta, Data: map[string]string{"prices.yaml": string(list)},
	})
	if err != nil {
		return fmt.Errorf("writing the ConfigMap: %w", err)
	}
	_, err = out.Write(text)
	return err
}
