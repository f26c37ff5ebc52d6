package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
)

// prices writes a ConfigMap with a price list from flat rates to out.
func prices(arguments []string, out io.Writer) error {
	flags := pflag.NewFlagSet("capi-agent prices", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), `Usage: capi-agent prices [flags] MACHINE…

Prints a ConfigMap with a price list, for machines that have no price of a cloud. A MACHINE is an instance type with its resources or with its
price:

      large=cpu=8,memory=32Gi,nvidia.com/gpu=1
      r760=900/month

%s`, flags.FlagUsages())
	}
	var (
		rates pricing.FlatRates
		of    pricing.FlatEntry
		meta  metav1.ObjectMeta
	)
	currency := flags.String("currency", "", "The prices' currency, an ISO 4217 code.")
	for _, f := range []struct {
		target      *float64
		name, usage string
	}{
		{&rates.PerMachine, "per-machine", "The price per hour of a machine of any size."},
		{&rates.PerCPU, "per-cpu", "The price per hour of a CPU."},
		{&rates.PerGiB, "per-gib", "The price per hour of a GiB of memory."},
		{&rates.PerDiskGiB, "per-disk-gib", "The price per hour of a GiB of ephemeral-storage."},
		{&rates.PerAccelerator, "per-gpu", "The price per hour of one unit of any extended resource."},
	} {
		flags.Float64Var(f.target, f.name, 0, f.usage)
	}
	flags.StringVar(&of.Cluster, "cluster", "",
		"The Cluster that the prices are for, as <namespace>/<name>, in which * matches any characters. Empty: all.")
	flags.StringVar(&of.Zone, "zone", "", "The zone that the prices are for. Empty: all.")
	flags.StringVar(&of.Region, "region", "", "The region that the prices are for. Empty: all.")
	flags.StringVar(&of.Infrastructure, "infrastructure", "",
		"The kind of the infrastructure objects that the prices are for, for example Metal3Machine. Empty: all.")
	flags.StringVar(&of.CapacityType, "capacity-type", "", "The capacity type that the prices are for. Empty: all.")
	flags.StringVar(&meta.Namespace, "namespace", "capi-agent-system", "The ConfigMap's namespace.")
	flags.StringVar(&meta.Name, "name", "prices", "The ConfigMap's name.")
	if err := flags.Parse(arguments); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	list, err := pricing.FlatList(*currency, rates, of, flags.Args())
	if err != nil {
		return err
	}
	text, err := yaml.Marshal(corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: meta, Data: map[string]string{"prices.yaml": string(list)},
	})
	if err != nil {
		return fmt.Errorf("writing the ConfigMap: %w", err)
	}
	_, err = out.Write(text)
	return err
}
